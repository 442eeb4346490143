"""The optimizer steps of a batch: which groups each trains on, in which order, over several passes; pure.

The groups are split once, and every pass takes the mini-batches in an order of its own. So a mini-batch has the same
micro-batches in every pass, and the log-probabilities that are computed before the first optimizer step fit all of them. Split
and orders follow from ``run.seed`` and the step alone: a resumed run, and a replay, make the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Passes:
    """The mini-batches of a batch, and the passes over them."""

    groups: tuple[tuple[int, ...], ...]  # of each mini-batch, by their place in the batch, ascending
    orders: tuple[tuple[int, ...], ...]  # of each pass: numbers of mini-batches
    stop_kl: float | None = None  # no further pass once the KL to the proximal policy was above this in one
    sizes: tuple[int, ...] = ()  # micro-batches of each mini-batch, the same on every rank

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
