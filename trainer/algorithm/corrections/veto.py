"""Veto: one token that is far too unlikely leaves its sequence out."""

from __future__ import annotations

import math

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.lazy_torch import Tensor


class VetoOptions(Options):
    veto: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="A sequence with a token whose ratio is below this is left out."
    )


@correction(options=VetoOptions, source="verl, ROLL", switch="veto")
def veto(drift: Drift, *, veto: float) -> Tensor:
    """Leave out sequences in which any token's ratio is below a threshold, [N] bool."""
    catastrophic = (drift.mismatch < math.log(veto)).to(drift.mismatch.dtype)
    return drift.sequences.spread(drift.sequences.sum(catastrophic)) == 0
