"""GSPO, its token form and LUSPO: the ratio of a sequence is the geometric mean of its tokens' ratios.

A product of T token ratios spreads as exp(sigma sqrt(T)): any bound on it becomes a filter on the
length. The geometric mean spreads as exp(sigma / sqrt(T)) and holds for answers of any length.
"""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.losses.interface import GRPO, DualClipRange, LossTerms, Tokens, policy_loss
from penstock.trainer.algorithm.losses.tokens import clip_terms

GSPO = {**GRPO, "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}


class GspoTokenOptions(DualClipRange):
    gspo_token_limit: bool = Field(
        default=True,
        description="No gradient where a token's log-ratio is beyond ±20, as in gspo; false: as runs recorded without this key.",
    )


@policy_loss(options=DualClipRange, source="arXiv 2507.18071", presets={"gspo": {**GSPO, "loss": "gspo"}})
def gspo(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """Clip the geometric mean of a sequence's ratios (group sequence policy optimisation).

    ``s = exp(mean over the sequence of log r)`` and ``L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``
    for every token of the sequence; the paper averages over sequences and clips at 3e-4 / 4e-4. Same as verl
    `gspo`, TRL ``importance_sampling_level="sequence"``, OpenRLHF `gspo`. A ``dual_clip`` bounds s where A < 0.
    """
    ratio = tokens.sequences.spread(tokens.sequence_log_ratio.exp())
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


@policy_loss(
    options=GspoTokenOptions, source="arXiv 2507.18071, eq. 13", presets={"gspo_token": {**GSPO, "loss": "gspo_token"}}
)
def gspo_token(
    tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None, gspo_token_limit: bool = True
) -> LossTerms:
    """Clip as `gspo` does, for advantages that may differ by token: the sequence's ratio, the token's gradient.

    ``s_t = exp(log p_t - sg(log p_t) + sg(log s))``. Equal to `gspo` where the advantage is one per sequence.
    """
    held = tokens.sequences.spread(tokens.sequence_log_ratio.detach())
    own = tokens.log_ratio if gspo_token_limit else tokens.current
    ratio = (own - own.detach() + held).exp()
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


@policy_loss(options=DualClipRange, source="arXiv 2602.05261")
def luspo(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """Multiply the loss of `gspo` by the length of the sequence (LUSPO)."""
    terms = gspo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    lengths = tokens.sequences.spread(tokens.sequences.lengths(terms.ratio))
    return LossTerms(terms.loss * lengths, terms.ratio, terms.clipped, terms.dual_clipped)
