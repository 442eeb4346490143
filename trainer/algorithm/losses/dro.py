"""DRO: the policy gradient with a quadratic drift to the anchor."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.losses.interface import LossTerms, Options, Tokens, none_of, policy_loss


class DroOptions(Options):
    dro_beta: float = Field(default=0.1, ge=0.0, description="dro: weight of half the squared log-ratio.")


@policy_loss(options=DroOptions, source="arXiv 2501.12599")
def dro(tokens: Tokens, *, dro_beta: float) -> LossTerms:
    """Add a quadratic drift to the anchor to the policy gradient (Kimi k1.5 and DRO).

    ``L = -A log p + dro_beta / 2 (log r)^2``.
    """
    log_ratio = tokens.log_ratio
    loss = -tokens.advantages * tokens.current + 0.5 * dro_beta * log_ratio.square()
    return LossTerms(loss, log_ratio.detach().exp(), none_of(loss), none_of(loss))
