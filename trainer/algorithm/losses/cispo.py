"""CISPO: a capped importance weight, detached."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.interface import GRPO, LossTerms, Tokens, WeightCap, none_of, policy_loss


@policy_loss(
    options=WeightCap, source="arXiv 2506.13585", presets={"cispo": {**GRPO, "loss": "cispo", "weight_cap": 4.0}}
)
def cispo(tokens: Tokens, *, weight_cap: float, floor: float = 0.0) -> LossTerms:
    """Clip the importance weight, so that no token loses its gradient (MiniMax-M1).

    ``L = -sg(clamp(r, floor, weight_cap)) A log p``, token mean. ``weight_cap`` is absolute: verl's
    ``clip_ratio_high`` of 3.0 and TRL's ``epsilon_high`` of 4.0 are both a cap of 4. ScaleRL found caps 4 to 8 equal.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(floor, weight_cap)
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, none_of(ratio), ratio > weight_cap)
