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
    """Leave out tokens outside a band around the clip that narrows with their age, [N] bool."""
    return inside_age_band(
        drift.to_behaviour.exp(), drift.advantages, drift.ages,
        clip_low=clip_low, clip_high=clip_high, cap=age_band_cap, decay=age_band_decay,
    )  # fmt: skip


def inside_age_band(
    ratio: Tensor, advantages: Tensor, age: Tensor, *, clip_low: float, clip_high: float, cap: float, decay: float = 0.0
) -> Tensor:
    """Return which tokens are inside the band (AgentRL's `importance_weight_cap_ratio`), [N] bool.

    With d = exp(-decay age): a token stays where A > 0 and r <= 1 + clip_high cap d, where A < 0 and
    r >= 1 - clip_low cap d, and where A = 0.

    Args:
        ratio: [N].
        advantages: [N].
        age: [N] steps since the sample was made, at least 0.
        clip_low: The clip's lower width.
        clip_high: Its upper width; AgentRL's ``epsilon + epsilon_higher``.
        cap: How many clip widths a fresh token may be away.
        decay: How fast the band narrows (`out_of_date_decay`); AgentRL's `strict_in_bound` is cap = 1.
    """
    width = cap * (-decay * age.clamp(min=0)).exp()
    high = (advantages > 0) & (ratio > 1.0 + clip_high * width)
    low = (advantages < 0) & (ratio < 1.0 - clip_low * width)
    return ~(high | low)
