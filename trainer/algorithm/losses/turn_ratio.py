"""Ratios of whole turns: the importance ratio of an episode's turn is the geometric mean of its tokens' ratios."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.gspo import GSPO
from penstock.trainer.algorithm.losses.interface import GRPO, DualClipRange, LossTerms, Tokens, policy_loss
from penstock.trainer.algorithm.losses.tokens import clip_terms


@policy_loss(
    options=DualClipRange,
    source="ROLL ratio_type = segment; arXiv 2507.18071 by turn",
    presets={"segment": {**GRPO, "loss": "turn_ratio"}, "gspo_turn": {**GSPO, "loss": "turn_ratio"}},
)
def turn_ratio(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """Clip the geometric mean of a turn's ratios, for every token of the turn.

    ``s = exp(mean over the turn of log r)`` and ``L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``. With PPO's widths
    this is ROLL's ``ratio_type = segment``, with GSPO's it is GSPO by turn; `gspo` takes the mean over a whole row. Where
    every trajectory is one turn, the two are the same.
    """
    ratio = tokens.turns.spread(tokens.turns.mean(tokens.log_ratio).exp())
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
