"""Importance weights of the trainer over the sampler: truncated, clipped or masked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.corrections.ratios import Level, log_weights
from penstock.trainer.algorithm.lazy_torch import Tensor

Bound = Literal["truncate", "clip", "mask"]


class ImportanceOptions(Options):
    importance: Literal["none", "token", "sequence", "geometric", "root"] = Field(
        default="none", description="Importance weights of the trainer over the sampler, on top of the loss."
    )
    importance_bound: Bound = Field(
        default="truncate", description="Outside the band: min (TIS), both ends, or weight 0 (IcePop, masked IS)."
    )
    importance_high: float = Field(default=2.0, gt=0.0, description="Upper end of the weights' band.")
    importance_low: float = Field(default=0.0, ge=0.0, description="Lower end of the weights' band.")

    @model_validator(mode="after")
    def _has_a_band(self) -> ImportanceOptions:
        if self.importance_low > self.importance_high:
            raise ValueError(
                f"algorithm.importance_low = {self.importance_low} is above algorithm.importance_high = "
                f"{self.importance_high}; no weight would be kept"
            )
        return self


@correction(options=ImportanceOptions, source="TIS; IcePop, arXiv 2510.18855", switch="importance", repeats_ratio=True)
def importance(
    drift: Drift, *, importance: Level, importance_bound: Bound, importance_high: float, importance_low: float
) -> Tensor:
    """Weigh tokens by the ratio of the trainer to the sampler, bounded, [N].

    `truncate`: min(w, importance_high), truncated importance sampling (TIS). `clip`: also at least importance_low.
    `mask`: w inside [importance_low, importance_high] and 0 outside: IcePop (arXiv 2510.18855) at token level, masked
    importance sampling at sequence level. The levels are those of `ratios.py`.
    """
    weights = log_weights(drift.mismatch, drift.sequences, importance).exp()
    if importance_bound == "mask":
        return weights * ((weights >= importance_low) & (weights <= importance_high))
    return weights.clamp(importance_low if importance_bound == "clip" else 0.0, importance_high)
