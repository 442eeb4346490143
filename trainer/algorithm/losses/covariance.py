"""Clip-Cov and KL-Cov: what is done to the few tokens that would lower the entropy most.

Covariances, means and shares are those of the tokens of one micro-batch, so these losses are the paper's where
a rank's whole batch is one micro-batch; otherwise how the batch is split changes them.
"""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.interface import ClipRange, LossTerms, Options, Tokens, none_of, policy_loss
from penstock.trainer.algorithm.losses.tokens import clip_terms


class ClipCovOptions(ClipRange):
    clip_cov_share: float = Field(
        default=2e-4, gt=0.0, le=1.0, description="clip_cov: largest share of tokens that is detached."
    )
    clip_cov_low: float = Field(default=1.0, description="clip_cov: lower end of a candidate's covariance.")
    clip_cov_high: float = Field(default=5.0, description="clip_cov: upper end of a candidate's covariance.")


class KlCovOptions(Options):
    kl_cov_share: float = Field(
        default=2e-4, gt=0.0, le=1.0, description="kl_cov: share of tokens of largest covariance that is penalised."
    )
    kl_cov_penalty: float = Field(default=1.0, ge=0.0, description="kl_cov: weight of their absolute log-ratio.")


@policy_loss(options=ClipCovOptions, source="arXiv 2505.22617")
def clip_cov(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_share: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> LossTerms:
    """Clip as PPO does and detach a few tokens that would lower the entropy most.

    Candidates have a covariance ``(A - mean A)(log p - mean log p)`` between ``clip_cov_low`` and
    ``clip_cov_high`` and are not clipped already; at most ``clip_cov_share`` of all tokens are drawn from them, by a
    generator seeded with the number of candidates, so that a replay draws the same ones.
    """
    terms = clip_terms(
        tokens.log_ratio.exp(), tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    covariance = _covariance(tokens)
    within = (covariance > clip_cov_low) & (covariance < clip_cov_high)
    candidates = torch.nonzero(within & ~terms.clipped).flatten()
    wanted = min(len(candidates), max(1, int(clip_cov_share * len(covariance))))
    generator = torch.Generator().manual_seed(len(candidates))
    drawn = torch.randperm(len(candidates), generator=generator).to(candidates.device)[:wanted]
    detached = none_of(terms.loss)
    detached[candidates[drawn]] = True
    return LossTerms(terms.loss * ~detached, terms.ratio, terms.clipped | detached, terms.dual_clipped)


@policy_loss(options=KlCovOptions, source="arXiv 2505.22617")
def kl_cov(tokens: Tokens, *, kl_cov_share: float, kl_cov_penalty: float) -> LossTerms:
    """Penalise the KL of the tokens of highest covariance.

    ``L = -r A``, plus ``kl_cov_penalty |log r|`` on the ``kl_cov_share`` of tokens with the largest covariance.
    """
    log_ratio = tokens.log_ratio
    ratio = log_ratio.exp()
    loss = -tokens.advantages * ratio
    picked = none_of(loss)
    if len(loss):
        picked[torch.topk(_covariance(tokens), max(1, int(kl_cov_share * len(loss)))).indices] = True
    return LossTerms(loss + kl_cov_penalty * log_ratio.abs() * picked, ratio.detach(), none_of(loss), none_of(loss))


def _covariance(tokens: Tokens) -> Tensor:
    if not len(tokens.current):
        return tokens.advantages.detach()
    now = tokens.current.detach()
    return (tokens.advantages - tokens.advantages.mean()) * (now - now.mean())
