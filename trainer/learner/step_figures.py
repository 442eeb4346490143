"""The figures of an optimizer step, of a pass over a batch, and of all steps of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from penstock.trainer.algorithm.mismatch import FRESH_MAXIMA, FRESH_SUMS
from penstock.trainer.algorithm.objective import Outcome
from penstock.trainer.learner.health.flops import NO_WORK, Work
from penstock.trainer.learner.health.step_watch import LayerFigures
from penstock.trainer.learner.kept_rows import KeptRows
from penstock.trainer.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True)
class PassFigures:
    """What was measured in one of several passes over a batch."""

    num_updates: int  # optimizer steps
    clip_fraction: float
    kl_proximal: float  # per token, from the policy before the batch to the one before each optimizer step


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one optimizer step did, or all those of a batch, over all ranks; the same on every rank."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    sums: dict[str, float]
    maxima: dict[str, float]
    critic: Mapping[str, float] = field(default_factory=dict)  # its figures, in a run with a critic
    lr_factor: float = 1.0  # of the schedule's learning rate, contained in ``lr``
    passes: tuple[PassFigures, ...] = ()  # in a run with several optimizer steps on a batch
    layers: Mapping[str, LayerFigures] = field(default_factory=dict)  # by group of layers
    left_out: tuple[bool, ...] = ()  # of each optimizer step, in order: whether it was an outlier and not made
    work: Work = NO_WORK  # of all passes of the policy for the batch, over all ranks
    kept: KeptRows | None = field(default=None, compare=False)  # the log-probabilities that were asked for; on rank 0


@dataclass(slots=True)
class StepSums:
    """Adds up the figures of the micro-batches of a step."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Add those of a micro-batch."""
        self.loss += float(outcome.loss.detach())
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in outcome.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def over(self, dims: ParallelDims) -> tuple[float, dict[str, float], dict[str, float]]:
        """Return loss, sums and maxima over all ranks; collective."""
        loss, *sums = dims.sum([self.loss, *self.sums.values()])
        top = dims.maximum(list(self.maxima.values()))
        return loss, dict(zip(self.sums, sums, strict=True)), dict(zip(self.maxima, top, strict=True))


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
