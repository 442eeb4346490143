"""The metrics of an optimizer step, of a pass over a batch, and of all steps of a batch; and the rows whose log-probabilities are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from penstock.protocol.packs.step_logprobs import CLIPPED, DUAL_CLIPPED, REJECTED
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.mismatch import FRESH_MAXIMA, FRESH_SUMS
from penstock.trainer.algorithm.objective import Outcome, TokenOutcomes
from penstock.trainer.learner.flops import NO_WORK, Work
from penstock.trainer.learner.step_watch import LayerMetrics
from penstock.trainer.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Rows of a plan, in any order, and the values of their sampled tokens one row after another."""

    rows: npt.NDArray[np.int64]  # [R] numbers in the plan
    counts: npt.NDArray[np.int64]  # [R] sampled tokens of each
    logprobs: npt.NDArray[np.float32]  # [N]
    outcomes: npt.NDArray[np.uint8]  # [N] as in `StepLogprobs`

    def to_bytes(self) -> bytes:
        arrays = self.rows, self.counts, self.logprobs, self.outcomes
        packed = msgpack.packb([array.tobytes() for array in arrays])
        assert packed is not None
        return packed

    @classmethod
    def from_bytes(cls, packed: bytes) -> KeptRows:
        rows, counts, logprobs, outcomes = msgpack.unpackb(packed)
        return cls(
            np.frombuffer(rows, np.int64),
            np.frombuffer(counts, np.int64),
            np.frombuffer(logprobs, np.float32),
            np.frombuffer(outcomes, np.uint8),
        )

    @classmethod
    def joined(cls, parts: Sequence[KeptRows]) -> KeptRows:
        return cls(
            _joined([part.rows for part in parts], np.int64),
            _joined([part.counts for part in parts], np.int64),
            _joined([part.logprobs for part in parts], np.float32),
            _joined([part.outcomes for part in parts], np.uint8),
        )


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


class RowRecorder:
    """Takes the rows below ``num_rows`` of one rank's micro-batches; an `Observer` of a policy."""

    def __init__(self, micro_batches: Sequence[Sequence[int]], num_rows: int) -> None:
        """``micro_batches`` are the plan's row numbers of this rank, in the order in which the policy takes them."""
        self._micro_batches = iter(micro_batches)
        self._num_rows = num_rows
        self._parts: list[KeptRows] = []

    def __call__(self, tokens: TokenOutcomes | None, batch: MicroBatch) -> None:
        """Take the rows of the next micro-batch of the plan; one without outcomes, as of pairs, is none of it."""
        if tokens is None:
            return
        rows = np.array(next(self._micro_batches), np.int64)
        if not (wanted := rows < self._num_rows).any():
            return
        counts = torch.bincount(batch.sequence, minlength=len(rows)).numpy()
        outcomes = tokens.clipped.byte() * CLIPPED + tokens.dual_clipped.byte() * DUAL_CLIPPED
        outcomes = outcomes + (~tokens.kept).byte() * REJECTED
        logprobs, outcomes = tokens.logprobs.float().cpu().numpy(), outcomes.cpu().numpy()
        if not wanted.all():
            of_tokens = np.repeat(wanted, counts)
            rows, counts, logprobs, outcomes = rows[wanted], counts[wanted], logprobs[of_tokens], outcomes[of_tokens]
        self._parts.append(KeptRows(rows, counts, logprobs, outcomes))

    def gather(self, dims: ParallelDims) -> KeptRows:
        parts = dims.gather(KeptRows.joined(self._parts).to_bytes())
        return KeptRows.joined([KeptRows.from_bytes(part) for part in parts])


@dataclass(frozen=True, slots=True)
class PassMetrics:
    num_updates: int  # optimizer steps
    clip_fraction: float
    kl_proximal: float  # per token, from the policy before the batch to the one before each optimizer step


@dataclass(frozen=True, slots=True)
class StepMetrics:
    loss: float
    grad_norm: float  # before clipping
    lr: float
    sums: dict[str, float]
    maxima: dict[str, float]
    critic: Mapping[str, float] = field(default_factory=dict)  # its metrics, in a run with a critic
    lr_factor: float = 1.0  # of the schedule's learning rate, contained in ``lr``
    passes: tuple[PassMetrics, ...] = ()  # in a run with several optimizer steps on a batch
    layers: Mapping[str, LayerMetrics] = field(default_factory=dict)  # by group of layers
    left_out: tuple[bool, ...] = ()  # of each optimizer step, in order: whether it was an outlier and not made
    work: Work = NO_WORK  # of all passes of the policy for the batch, over all ranks
    kept: KeptRows | None = field(default=None, compare=False)  # the log-probabilities that were asked for; on rank 0


@dataclass(slots=True)
class StepSums:
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.loss += float(outcome.loss.detach())
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in outcome.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def over(self, dims: ParallelDims) -> tuple[float, dict[str, float], dict[str, float]]:
        loss, *sums = dims.sum([self.loss, *self.sums.values()])
        top = dims.maximum(list(self.maxima.values()))
        return loss, dict(zip(self.sums, sums, strict=True)), dict(zip(self.maxima, top, strict=True))


def pass_metrics(steps: Sequence[StepMetrics]) -> PassMetrics:
    """Return the metrics of one pass: means over its tokens, each measured before the optimizer step on its mini-batch."""
    tokens = max(1.0, sum(step.sums["tokens"] for step in steps))
    return PassMetrics(
        num_updates=len(steps),
        clip_fraction=sum(step.sums["clipped"] for step in steps) / tokens,
        kl_proximal=sum(step.sums["kl_proximal"] for step in steps) / tokens,
    )


def batch_metrics(passes: Sequence[Sequence[StepMetrics]]) -> StepMetrics:
    """Return the metrics of a batch: means over its optimizer steps, and largest values.

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
        passes=tuple(pass_metrics(some) for some in passes),
    )


def _mean_layers(steps: Sequence[Mapping[str, LayerMetrics]]) -> dict[str, LayerMetrics]:
    found = {}
    for name in steps[0]:
        ratios = [ratio for step in steps if (ratio := step[name].update_ratio) is not None]
        found[name] = LayerMetrics(fmean(step[name].grad_norm for step in steps), fmean(ratios) if ratios else None)
    return found
