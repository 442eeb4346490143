"""AgentRL's band around the clip, which narrows with age."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import ClipRange, Drift, correction
from penstock.trainer.algorithm.lazy_torch import Tensor


class AgeBandOptions(ClipRange):
    age_band_cap: float | None = Field(
        default=None, gt=0.0, description="Tokens more than so many clip widths outside are left out; none: off."
    )
    age_band_decay: float = Field(default=0.0, ge=0.0, description="How fast that band narrows, per version of age.")


@correction(options=AgeBandOptions, source="AgentRL", switch="age_band_cap")
def age_band(
    drift: Drift, *, clip_low: float, clip_high: float, age_band_cap: float, age_band_decay: float = 0.0
) -> Tensor:
    """Leave out tokens outside a band around the clip that narrows with their age, [N] bool.

    AgentRL's `importance_weight_cap_ratio`: with r = current / behaviour and d = exp(-age_band_decay age), a token stays where
    A > 0 and r <= 1 + clip_high age_band_cap d, where A < 0 and r >= 1 - clip_low age_band_cap d, and where A = 0. AgentRL's
    ``epsilon + epsilon_higher`` is clip_high, `out_of_date_decay` age_band_decay, and `strict_in_bound` a cap of 1.
    """
    ratio = drift.to_behaviour.exp()
    width = age_band_cap * (-age_band_decay * drift.ages.clamp(min=0)).exp()
    high = (drift.advantages > 0) & (ratio > 1.0 + clip_high * width)
    low = (drift.advantages < 0) & (ratio < 1.0 - clip_low * width)
    return ~(high | low)
