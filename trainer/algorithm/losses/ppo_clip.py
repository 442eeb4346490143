"""PPO's clipped objective."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.losses.interface import DualClipRange, LossTerms, Tokens, policy_loss
from penstock.trainer.algorithm.losses.tokens import clip_terms


class PpoClipOptions(DualClipRange):
    token_tis_cap: float | None = Field(
        default=None, ge=1.0, description="Token-level truncation of the importance weight in the gradient; none: off."
    )


@policy_loss(options=PpoClipOptions, source="arXiv 1707.06347, 2503.14476, 1912.09729")
def ppo_clip(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    token_tis_cap: float | None = None,
) -> LossTerms:
    """Clip the ratio as PPO does, asymmetrically and with a dual clip.

    With ``r = exp(current - anchor)``, per token:

        L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        L = min(L, -dual_clip A)                     where A < 0 and a dual clip is set
        L = L * sg(min(1, token_tis_cap / r))        when a cap is set

    Against the behaviour log-probabilities the ratio is importance weight and trust region in one,
    which keeps training on stale samples stable with one step per batch. The dual clip stops the tokens that
    do the damage then: failed samples that the policy has since learned to prefer (r large, A < 0).
    ``token_tis_cap`` truncates the same ratio, so that the gradient of a token that is not clipped is
    ``-A * min(r, cap) * grad(current)``; it never multiplies a second weight onto the ratio.

    The same numbers come from verl `vanilla`, TRL `grpo`/`bnpo`/`dapo` (its ``delta`` is the dual clip),
    OpenRLHF `ppo` and AReaL; ROLL's dual clip is 1 + 2 clip. Differs: the log-ratio is limited to ±20.

    Args:
        tokens: N sampled tokens.
        clip_low: How far the ratio may fall below 1 before the clip.
        clip_high: How far it may rise above 1.
        dual_clip: Bound (> 1) of the ratio for negative advantages; None: no bound.
        token_tis_cap: Bound of the importance weight in the gradient; None: no bound.
    """
    ratio = tokens.log_ratio.exp()
    terms = clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if token_tis_cap is None:
        return terms
    factor = (token_tis_cap / terms.ratio).clamp(max=1.0)
    return LossTerms(terms.loss * factor, terms.ratio, terms.clipped, terms.dual_clipped)
