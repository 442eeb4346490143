"""MiniRL: a truncated weight to the sampler and a stop in the direction of the advantage."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.interface import (
    GRPO,
    MAX_LOG_RATIO,
    ClipRange,
    LossTerms,
    Tokens,
    WeightCap,
    none_of,
    policy_loss,
)
from penstock.trainer.algorithm.losses.tokens import directional_stop


class MinirlOptions(WeightCap, ClipRange):
    """Options of `minirl`."""


@policy_loss(
    options=MinirlOptions,
    source="arXiv 2512.01374",
    presets={
        "minirl": {
            **GRPO, "normalise_by_std": False, "loss": "minirl", "clip_low": 0.2, "clip_high": 0.27, "weight_cap": 5.0,
            "aggregation": "seq-mean-token-sum",
        }
    },
)  # fmt: skip
def minirl(tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: float) -> LossTerms:
    """Truncate the weight to the sampler and mask by direction against the anchor (Qwen's MiniRL).

    ``L = -M sg(min(current / behaviour, weight_cap)) A log p``; M is 0 where A > 0 and r > 1 + clip_high or
    A < 0 and r < 1 - clip_low, with r = current / anchor. Mean over sequences of sums over tokens,
    advantages without the division by the standard deviation.
    """
    ratio = tokens.log_ratio.detach().exp()
    stopped = directional_stop(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    to_sampler = (tokens.current.detach() - tokens.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = to_sampler.clamp(max=weight_cap) * ~stopped
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, stopped, none_of(stopped))
