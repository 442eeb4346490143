"""The optimizer steps of a batch: which groups each trains on, in which order, over several passes, and their figures; pure.

The groups are split once, and every pass takes the mini-batches in an order of its own. So a mini-batch has the same
micro-batches in every pass, and the log-probabilities that are computed before the first optimizer step fit all of them. Split
and orders follow from ``run.seed`` and the step alone: a resumed run, and a replay, make the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from penstock.trainer.algorithm.mismatch import FRESH_MAXIMA, FRESH_SUMS
from penstock.trainer.learner.health.step_watch import LayerFigures
from penstock.trainer.learner.policy import PassFigures, StepFigures


@dataclass(frozen=True, slots=True)
class Passes:
    """The mini-batches of a batch, and the passes over them."""

    groups: tuple[tuple[int, ...], ...]  # of each mini-batch, by their place in the batch, ascending
    orders: tuple[tuple[int, ...], ...]  # of each pass: numbers of mini-batches
    stop_kl: float | None = None  # no further pass once the KL to the proximal policy was above this in one
    sizes: tuple[int, ...] = ()  # micro-batches of each mini-batch, the same on every rank

    def to_wire(self) -> list[Any]:
        """Return the passes as MessagePack types."""
        return [
            [list(some) for some in self.groups],
            [list(some) for some in self.orders],
            self.stop_kl,
            list(self.sizes),
        ]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Passes:
        """Rebuild what `to_wire` wrote."""
        groups, orders, stop_kl, sizes = wire
        return cls(tuple(map(tuple, groups)), tuple(map(tuple, orders)), stop_kl, tuple(sizes))

    def cut(self, micro_batches: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the micro-batches of each mini-batch, of all those of a rank in their order."""
        ends = [sum(self.sizes[: number + 1]) for number in range(len(self.sizes))]
        return [micro_batches[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]

    def is_exceeded(self, kl: float) -> bool:
        """Return True if no pass may follow one with this KL to the proximal policy, per token."""
        return self.stop_kl is not None and not kl <= self.stop_kl  # a NaN is above every limit

    def updates(self, num_passes: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of every optimizer step of the first ``num_passes`` passes, in the order they were made."""
        return tuple(self.groups[number] for order in self.orders[:num_passes] for number in order)


def plan_passes(
    groups: Sequence[int], *, epochs: int, minibatches: int, seed: int, step: int, stop_kl: float | None = None
) -> Passes:
    """Split the groups that are trained on into mini-batches, and order these for every pass.

    Args:
        groups: Places in the batch of the groups that have a trajectory to train on.
        epochs: Passes over the batch.
        minibatches: Optimizer steps of a pass; fewer where there are fewer groups. Their sizes differ by at most one group.
        seed: ``run.seed``.
        step: Number of steps of the run before this one.
        stop_kl: See `Passes`.
    """
    shuffled = _shuffled(groups, f"{seed}.{step}")
    count = max(1, min(minibatches, len(shuffled)))
    edges = [len(shuffled) * number // count for number in range(count + 1)]
    parts = tuple(tuple(sorted(shuffled[start:end])) for start, end in pairwise(edges))
    first = tuple(range(count))  # the groups are in a random order already
    orders = [first, *(tuple(_shuffled(first, f"{seed}.{step}.{number}")) for number in range(1, epochs))]
    return Passes(parts, tuple(orders), stop_kl)


def _shuffled(values: Sequence[int], key: str) -> list[int]:
    """Return the values in the order of their hashes under a key: the same with every version of every library."""
    return sorted(values, key=lambda value: hashlib.sha256(f"{key}:{value}".encode()).digest())


def pass_figures(steps: Sequence[StepFigures]) -> PassFigures:
    """Return the figures of one pass: means over its tokens, each measured before the optimizer step on its mini-batch."""
    tokens = max(1.0, sum(step.sums["tokens"] for step in steps))
    return PassFigures(
        num_updates=len(steps),
        clip_fraction=sum(step.sums["clipped"] for step in steps) / tokens,
        kl_proximal=sum(step.sums["kl_proximal"] for step in steps) / tokens,
    )


def batch_figures(passes: Sequence[Sequence[StepFigures]]) -> StepFigures:
    """Return the figures of a batch: means over its optimizer steps, and largest values.

    Sums are means over the passes, so that they count every token once. Engine and trainer are compared on the tokens of the
    first optimizer step: the trainer scored only those with the weights under which the engine sampled.
    """
    steps = [step for some in passes for step in some]
    first = steps[0]
    sums = {name: sum(step.sums[name] for step in steps) / len(passes) for name in first.sums}
    maxima = {name: max(step.maxima[name] for step in steps) for name in first.maxima}
    return replace(
        first,
        loss=fmean(step.loss for step in steps),
        grad_norm=fmean(step.grad_norm for step in steps),
        lr=fmean(step.lr for step in steps),
        lr_factor=fmean(step.lr_factor for step in steps),
        sums={**sums, **{name: first.sums[name] for name in FRESH_SUMS}},
        maxima={**maxima, **{name: first.maxima[name] for name in FRESH_MAXIMA}},
        layers=_mean_layers([step.layers for step in steps]),
        left_out=tuple(is_left_out for step in steps for is_left_out in step.left_out),
        passes=tuple(pass_figures(some) for some in passes),
    )


def _mean_layers(steps: Sequence[Mapping[str, LayerFigures]]) -> dict[str, LayerFigures]:
    """Return the means over optimizer steps; ratios over those that were made."""
    found = {}
    for name in steps[0]:
        ratios = [ratio for step in steps if (ratio := step[name].update_ratio) is not None]
        found[name] = LayerFigures(fmean(step[name].grad_norm for step in steps), fmean(ratios) if ratios else None)
    return found
