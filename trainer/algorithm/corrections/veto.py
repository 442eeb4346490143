"""Veto: one token that is far too unlikely leaves its sequence out."""

from __future__ import annotations

import math

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.lazy_torch import Tensor
from penstock.trainer.algorithm.losses.tokens import Sequences


class VetoOptions(Options):
    veto: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="A sequence with a token whose ratio is below this is left out."
    )


@correction(options=VetoOptions, source="verl, ROLL", switch="veto")
def veto(drift: Drift, *, veto: float) -> Tensor:
    """Leave out sequences in which any token's ratio is below a threshold, [N] bool."""
    return not_vetoed(drift.mismatch, drift.sequences, veto)


def not_vetoed(log_ratio: Tensor, sequences: Sequences, threshold: float) -> Tensor:
    """Return False for every token of a sequence in which any token's ratio is below ``threshold``, [N]."""
    catastrophic = (log_ratio.detach() < math.log(threshold)).to(log_ratio.dtype)
    return sequences.spread(sequences.sum(catastrophic)) == 0
