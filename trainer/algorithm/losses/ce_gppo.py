"""CE-GPPO: a clip that keeps some gradient."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import torch
from penstock.trainer.algorithm.losses.interface import GRPO, DualClipRange, LossTerms, Tokens, none_of, policy_loss


class CeGppoOptions(DualClipRange):
    beta_low: float = Field(default=0.75, ge=0.0, description="ce_gppo: share of gradient left below the clip.")
    beta_high: float = Field(default=1.0, ge=0.0, description="ce_gppo: share of gradient left above the clip.")


@policy_loss(
    options=CeGppoOptions,
    source="arXiv 2509.20712",
    presets={
        "ce_gppo": {
            **GRPO, "loss": "ce_gppo", "clip_low": 0.2, "clip_high": 0.28, "beta_low": 0.75, "beta_high": 1.0,
        }
    },
)  # fmt: skip
def ce_gppo(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    beta_low: float,
    beta_high: float,
    dual_clip: float | None = None,
) -> LossTerms:
    """Keep a bounded gradient for clipped tokens instead of none.

        L = -beta_low  (1 - clip_low)  A r / sg(r)     where A < 0 and r < 1 - clip_low
        L = -beta_high (1 + clip_high) A r / sg(r)     where A > 0 and r > 1 + clip_high
        L = -r A                                       elsewhere, with the dual clip where one is set

    With both betas 0 the gradient is PPO's; the value is not (the clipped tokens count 0).
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    held = ratio.detach()
    low = (advantages < 0) & (held < 1.0 - clip_low)
    high = (advantages > 0) & (held > 1.0 + clip_high)
    loss = -advantages * ratio
    dual_clipped = none_of(held)
    if dual_clip is not None:
        dual_clipped = (advantages < 0) & (held > dual_clip)
        loss = torch.where(dual_clipped, -dual_clip * advantages, loss)
    unit = ratio / held
    loss = torch.where(low, -beta_low * (1.0 - clip_low) * advantages * unit, loss)
    loss = torch.where(high, -beta_high * (1.0 + clip_high) * advantages * unit, loss)
    return LossTerms(loss, held, low | high, dual_clipped)
