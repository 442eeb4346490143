"""DPPO: a stop by how far a token's probability moved, and prime-rl's ratio loss with the same mask."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.interface import (
    GRPO,
    ClipRange,
    LossTerms,
    Tokens,
    WeightCap,
    none_of,
    policy_loss,
)


class DppoOptions(WeightCap, ClipRange):
    """Options of `dppo_tv` and `dppo_kl`; the clip limits the move of the probability, or its divergence."""


class DppoTvRatioOptions(ClipRange):
    tv_drift: float = Field(default=1e-3, ge=0.0, description="dppo_tv_ratio: weight of the squared log-ratio.")


@policy_loss(
    options=DppoOptions,
    source="arXiv 2602.04879",
    presets={"dppo": {**GRPO, "loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "weight_cap": 20.0}},
)
def dppo_tv(tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: float | None = None) -> LossTerms:
    """Stop a token by how far its probability moved, not by its ratio.

    ``L = -sg(min(r, weight_cap)) A M log(current)``; M is 0 where the token already moved the way its advantage
    pushes by more than the limit: ``p - p_anchor > clip_high`` with A > 0, or ``p_anchor - p > clip_low`` otherwise.
    """
    now, before = tokens.current.detach().exp(), tokens.anchor.exp()
    stopped = torch.where(tokens.advantages > 0, now - before > clip_high, before - now > clip_low)
    return _stopped(tokens, stopped, weight_cap)


@policy_loss(options=DppoOptions, source="arXiv 2602.04879")
def dppo_kl(tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: float | None = None) -> LossTerms:
    """Stop a token by the divergence of the two Bernoulli distributions "this token or another".

    As `dppo_tv`, with ``KL(anchor || current)`` of those two distributions in place of the difference.
    """
    now, before = tokens.current.detach().exp(), tokens.anchor.exp()
    moved = before * (tokens.anchor - tokens.current.detach())
    moved = moved + (1.0 - before) * torch.log((1.0 - before + 1e-8) / (1.0 - now + 1e-8))
    stopped = torch.where(
        tokens.advantages > 0, (moved > clip_high) & (now > before), (moved > clip_low) & (now < before)
    )
    return _stopped(tokens, stopped, weight_cap)


@policy_loss(options=DppoTvRatioOptions, source="prime-rl")
def dppo_tv_ratio(tokens: Tokens, *, clip_low: float, clip_high: float, tv_drift: float) -> LossTerms:
    """Mask a ratio by total variation and penalise the squared drift (prime-rl's default loss).

    ``L = -M r A + tv_drift (log r)^2`` with M of `dppo_tv`, strict at A = 0 (nothing is masked there).
    """
    ratio = tokens.log_ratio.exp()
    now, before = tokens.current.detach().exp(), tokens.anchor.exp()
    up = (tokens.advantages > 0) & (now - before > clip_high)
    down = (tokens.advantages < 0) & (before - now > clip_low)
    stopped = up | down
    loss = -tokens.advantages * ratio * ~stopped + tv_drift * tokens.log_ratio.square()
    return LossTerms(loss, ratio.detach(), stopped, none_of(stopped))


def _stopped(tokens: Tokens, stopped: Tensor, weight_cap: float | None) -> LossTerms:
    ratio = tokens.log_ratio.detach().exp()
    weight = (ratio if weight_cap is None else ratio.clamp(max=weight_cap)) * ~stopped
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, stopped, none_of(stopped))
