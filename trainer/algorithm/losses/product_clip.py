"""PPO's clip on the product of a sequence's ratios."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.interface import MAX_LOG_RATIO, ClipRange, LossTerms, Tokens, policy_loss
from penstock.trainer.algorithm.losses.tokens import clip_terms


@policy_loss(options=ClipRange, source="TRL's RLOO trainer")
def product_clip(tokens: Tokens, *, clip_low: float, clip_high: float) -> LossTerms:
    """Clip the product of a sequence's ratios as PPO does (TRL's RLOO trainer).

    One loss per sequence: spread over its tokens so that `seq-mean-token-mean` gives the mean over sequences.
    """
    log_ratio = tokens.sequences.sum(tokens.log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = tokens.sequences.spread(log_ratio.exp())
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
