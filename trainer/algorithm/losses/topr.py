"""TOPR: tapered off-policy REINFORCE, with the product of a sequence's ratios or with the ratio of each token."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import torch
from penstock.trainer.algorithm.losses.interface import (
    GRPO,
    MAX_LOG_RATIO,
    LossTerms,
    Tokens,
    WeightCap,
    none_of,
    policy_loss,
)

_PRESET = {**GRPO, "normalise_by_std": False, "weight_cap": 1.0}


@policy_loss(
    options=WeightCap,
    source="arXiv 2503.14286",
    presets={"topr": {**_PRESET, "loss": "topr", "aggregation": "seq-mean-token-sum"}},
)
def topr(tokens: Tokens, *, weight_cap: float = 1.0, floor: float = 0.0) -> LossTerms:
    """Weigh successes by 1 and failures by the product of their sequence's ratios, limited.

    ``L = -w A log p`` with w = 1 where A >= 0 and the detached product of the sequence's ratios, limited to
    [floor, weight_cap], where A < 0. Mean over sequences of sums over tokens. ROLL calls it `use_topr_loss`
    (`tpro` in an old guide) and takes the ratio of each token (`topr_token`).
    """
    product = tokens.sequences.sum(tokens.log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = tokens.sequences.spread(product)
    weight = torch.where(tokens.advantages < 0, ratio.clamp(floor, weight_cap), torch.ones_like(ratio))
    capped = (tokens.advantages < 0) & (ratio > weight_cap)
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, none_of(capped), capped)


@policy_loss(options=WeightCap, source="ROLL", presets={"topr_token": {**_PRESET, "loss": "topr_token"}})
def topr_token(tokens: Tokens, *, weight_cap: float = 1.0) -> LossTerms:
    """Taper as `topr` does, with the ratio of each token instead of the sequence's product.

    ``L = -w A log p``, w = 1 where A >= 0, the ratio limited to [0, weight_cap] where A < 0.
    """
    ratio = tokens.log_ratio.detach().exp()
    capped = (tokens.advantages < 0) & (ratio > weight_cap)
    weight = torch.where(tokens.advantages < 0, ratio.clamp(max=weight_cap), torch.ones_like(ratio))
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, none_of(ratio), capped)
