"""Rejection by divergence from the sampler, of tokens or of whole sequences."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.corrections.ratios import divergence
from penstock.trainer.algorithm.lazy_torch import Tensor
from penstock.trainer.algorithm.losses.tokens import Sequences

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
    """Leave out tokens or sequences that diverge too far from the sampler, [N] bool."""
    return inside(drift.mismatch, drift.sequences, rejection, high=rejection_high, low=rejection_low)


def inside(
    log_ratio: Tensor, sequences: Sequences, statistic: Statistic, *, high: float, low: float | None = None
) -> Tensor:
    """Return which tokens a rejection by divergence keeps, [N] bool (names as in verl).

    The k1 statistics are ``-log r``, so their band, stated as ratios, bounds 1 / r; the others must not be
    above ``high``.

    Args:
        log_ratio: [N] proximal minus behaviour log-probabilities.
        sequences: Which token belongs where.
        statistic: Divergence, per token or combined over the sequence.
        high: Upper bound; a ratio for k1.
        low: Lower bound of k1, a ratio; None: 1 / high.
    """
    scope, form = statistic.rsplit("_", 1)
    values = divergence(log_ratio, form)  # type: ignore[arg-type]  the three forms
    match scope:
        case "seq_sum":
            values = sequences.spread(sequences.sum(values))
        case "seq_mean":
            values = sequences.spread(sequences.mean(values))
        case "seq_max":
            values = sequences.spread(sequences.maximum(values))
    if form == "k1":
        return (values >= math.log(1.0 / high if low is None else low)) & (values <= math.log(high))
    return values <= high
