"""Ratios of whole turns: the importance ratio of an episode's turn is the geometric mean of its tokens' ratios."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.interface import ClipRange, DualClip, LossTerms, Tokens, policy_loss
from penstock.trainer.algorithm.losses.tokens import clip_terms


class TurnRatioOptions(DualClip, ClipRange):
    """Options of `turn_ratio`."""


@policy_loss(
    options=TurnRatioOptions,
    source="ROLL ratio_type = segment; arXiv 2507.18071 by turn",
    presets={
        "segment": {"advantage": "grpo", "normalise_by_std": True, "loss": "turn_ratio", "aggregation": "token-mean"},
        "gspo_turn": {
            "advantage": "grpo", "normalise_by_std": True, "loss": "turn_ratio", "clip_low": 3e-4, "clip_high": 4e-4,
            "aggregation": "seq-mean-token-mean",
        },
    },
)  # fmt: skip
def turn_ratio(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """Clip the geometric mean of a turn's ratios, for every token of the turn.

    ``s = exp(mean over the turn of log r)`` and ``L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``. With PPO's widths
    this is ROLL's ``ratio_type = segment``, with GSPO's it is GSPO by turn; `gspo` takes the mean over a whole row. Where
    every trajectory is one turn, the two are the same.
    """
    ratio = tokens.turns.spread(tokens.turns.mean(tokens.log_ratio).exp())
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
