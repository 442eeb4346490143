"""Direct double-sided importance sampling."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.interface import GRPO, ClipRange, LossTerms, Tokens, none_of, policy_loss


@policy_loss(
    options=ClipRange,
    source="arXiv 2602.15763",
    presets={"double_sided": {**GRPO, "loss": "double_sided", "clip_low": 0.2, "clip_high": 0.28}},
)
def double_sided(tokens: Tokens, *, clip_low: float, clip_high: float) -> LossTerms:
    """Weigh by the ratio inside a band and by 0 outside (GLM-5).

    ``L = -sg(f) A log p`` with f = current / anchor inside (1 - clip_low, 1 + clip_high) and 0 outside,
    for either sign of the advantage. The width of the paper's band is unknown.
    """
    ratio = tokens.log_ratio.detach().exp()
    outside = (ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high)
    return LossTerms(-ratio * ~outside * tokens.advantages * tokens.current, ratio, outside, none_of(outside))
