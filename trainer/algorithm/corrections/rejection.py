"""Rejection by divergence from the sampler, of tokens or of whole sequences; and by one token that is far too unlikely, `veto`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.corrections.ratios import divergence
from penstock.trainer.algorithm.lazy_torch import Tensor

Statistic = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip


class RejectionOptions(Options):
    rejection: Statistic | None = Field(
        default=None, description="Divergence from the sampler by which tokens or sequences are left out; none: off."
    )
    rejection_high: float = Field(default=2.0, gt=0.0, description="Largest divergence kept; for k1 a ratio.")
    rejection_low: float | None = Field(default=None, gt=0.0, description="For k1, the lower ratio; none: 1 / high.")


@correction(options=RejectionOptions, source="verl", switch="rejection")
def rejection(
    drift: Drift, *, rejection: Statistic, rejection_high: float, rejection_low: float | None = None
) -> Tensor:
    """Leave out tokens or sequences that diverge too far from the sampler, [N] bool.

    The statistics have verl's names. Those of k1 are ``-log r``, so their band, stated as ratios, bounds 1 / r, below by
    ``rejection_low`` (None: 1 / rejection_high); the others must not be above ``rejection_high``.
    """
    sequences = drift.sequences
    scope, form = rejection.rsplit("_", 1)
    values = divergence(drift.mismatch, form)  # type: ignore[arg-type]  the three forms
    combine = {"seq_sum": sequences.sum, "seq_mean": sequences.mean, "seq_max": sequences.maximum}.get(scope)
    if combine is not None:
        values = sequences.spread(combine(values))
    if form == "k1":
        least = 1.0 / rejection_high if rejection_low is None else rejection_low
        return (values >= math.log(least)) & (values <= math.log(rejection_high))
    return values <= rejection_high


class VetoOptions(Options):
    veto: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="A sequence with a token whose ratio is below this is left out."
    )


@correction(options=VetoOptions, source="verl, ROLL", switch="veto")
def veto(drift: Drift, *, veto: float) -> Tensor:
    """Leave out sequences in which any token's ratio is below a threshold, [N] bool."""
    catastrophic = (drift.mismatch < math.log(veto)).to(drift.mismatch.dtype)
    return drift.sequences.spread(drift.sequences.sum(catastrophic)) == 0
