"""What a file that holds a correction needs: `correction`, `Drift`, `Options`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.trainer.algorithm.lazy_torch import Tensor
from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.parts import GRPO, ClipRange, Options, OptionsT_co, Part, decorator

__all__ = ["GRPO", "ClipRange", "Correction", "CorrectionFunction", "Drift", "Options", "correction"]
CorrectionFunction = Callable[..., Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """How far the sampled tokens of a micro-batch are from what sampled them; all detached."""

    mismatch: Tensor  # [N] log proximal / behaviour; log current / behaviour where nothing was recomputed
    to_behaviour: Tensor  # [N] log current / behaviour
    advantages: Tensor  # [N] before negative ones are weighed
    ages: Tensor  # [N] versions between sampling and training
    sequences: Sequences
    drift_limit: float | None = None  # largest (log current / behaviour)² that M2PO keeps in this batch


@dataclass(frozen=True, eq=False, kw_only=True)
class Correction(Part[OptionsT_co]):
    """A correction: ``fn(drift, **options)`` returns [N] bool, the tokens that are kept, or [N] weights.

    A weight multiplies a token's loss before aggregation, and a token of weight 0 counts as left out. None: nothing
    to leave out in this form of the correction.
    """

    switch: str = ""  # option that turns it on when it is not at its default; empty: algorithm.corrections names it
    repeats_ratio: bool = False  # it weighs by a ratio that a loss against the sampler holds already


correction = decorator(Correction)
"""Make a function a correction of the function's name; the arguments are the fields of `Correction`."""
