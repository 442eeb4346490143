"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import torch
from penstock.trainer.algorithm.losses.interface import GRPO, ClipRange, LossTerms, Tokens, none_of, policy_loss


@policy_loss(
    options=ClipRange,
    source="arXiv 2507.20673",
    presets={"gmpo": {**GRPO, "loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq-mean-token-mean"}},
)
def gmpo(tokens: Tokens, *, clip_low: float, clip_high: float) -> LossTerms:
    """Average clipped log-ratios over the sequence (geometric-mean policy optimisation).

    Token log-ratios are clipped to [-clip_low, clip_high] on the side their advantage pushes, then averaged:
    ``L = -A exp(mean of the clipped log r)``, one value per sequence, mean over sequences.
    """
    sign = tokens.advantages.sign()
    log_ratio = tokens.log_ratio
    bounded = log_ratio.clamp(-clip_low, clip_high)
    held = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = tokens.sequences.spread(tokens.sequences.mean(held).exp())
    advantages = tokens.sequences.spread(tokens.sequences.mean(tokens.advantages))
    clipped = (sign * log_ratio > sign * bounded).detach()
    return LossTerms(-advantages * ratio, ratio.detach(), clipped, none_of(clipped))
