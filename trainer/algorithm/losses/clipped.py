"""Token losses whose gradient flows through the ratio: PPO's clip and its relatives; pure."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from penstock.trainer.algorithm.losses.tokens import LossTerms, Tokens, none_of


def clip_terms(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossTerms:
    """Apply PPO's clip, and the dual clip where one is set, to any ratio [N]."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = (bounded > free).detach()
    dual_clipped = none_of(clipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = ((advantages < 0) & (ceiling < loss)).detach()
        loss = torch.where(dual_clipped, ceiling, loss)
    return LossTerms(loss, ratio.detach(), clipped & ~dual_clipped, dual_clipped)


def ppo_clip(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    token_tis_cap: float | None = None,
) -> LossTerms:
    """PPO's clipped objective, asymmetric and with dual clip (arXiv 1707.06347, 2503.14476, 1912.09729).

    With ``r = exp(current - anchor)``, per token:

        L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        L = min(L, -dual_clip A)                     where A < 0 and a dual clip is set
        L = L * sg(min(1, token_tis_cap / r))        when a cap is set

    Against the behaviour log-probabilities the ratio is importance weight and trust region in one,
    which is what keeps stale data safe with one step per batch. The dual clip stops the tokens that do
    the damage then: failed samples that the policy has since learned to prefer (r large, A < 0).
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


def ce_gppo(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    beta_low: float,
    beta_high: float,
    dual_clip: float | None = None,
) -> LossTerms:
    """Clipped tokens keep a bounded gradient instead of none (CE-GPPO, arXiv 2509.20712).

        L = -beta_low  (1 - clip_low)  A r / sg(r)     where A < 0 and r < 1 - clip_low
        L = -beta_high (1 + clip_high) A r / sg(r)     where A > 0 and r > 1 + clip_high
        L = -r A                                       elsewhere, with the dual clip where one is set

    With both betas 0 the gradient is PPO's; the value is not (the clipped tokens count 0).
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    held = ratio.detach()
    low = (advantages < 0) & (held < 1.0 - clip_low)
    high = (advantages > 0) & (held > 1.0 + clip_high)
    loss = -advantages * ratio
    dual_clipped = none_of(held)
    if dual_clip is not None:
        dual_clipped = (advantages < 0) & (held > dual_clip)
        loss = torch.where(dual_clipped, -dual_clip * advantages, loss)
    unit = ratio / held
    loss = torch.where(low, -beta_low * (1.0 - clip_low) * advantages * unit, loss)
    loss = torch.where(high, -beta_high * (1.0 + clip_high) * advantages * unit, loss)
    return LossTerms(loss, held, low | high, dual_clipped)


def sapo(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """Soft adaptive policy optimisation: a sigmoid gate instead of a clip (arXiv 2511.20347).

    ``L = -A sigmoid(tau (r - 1)) 4 / tau`` with ``tau_positive`` where A > 0 and ``tau_negative``
    elsewhere. The paper, verl and TRL average by sequence (`seq-mean-token-mean`), AReaL by token.
    """
    ratio = tokens.log_ratio.exp()
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    loss = -tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return LossTerms(loss, ratio.detach(), none_of(loss), none_of(loss))


def dppo(
    tokens: Tokens, *, divergence: Literal["tv", "kl"], limit_low: float, limit_high: float, cap: float | None = None
) -> LossTerms:
    """Stop a token by how far its probability moved, not by its ratio (DPPO, arXiv 2602.04879).

    ``L = -sg(min(r, cap)) A M log(current)``; M is 0 where the token already moved the way its advantage
    pushes: for ``tv`` by more than the limit in probability, ``p - p_anchor > limit_high`` with A > 0 or
    ``p_anchor - p > limit_low`` otherwise; for ``kl`` by more than the limit in the divergence of the two
    Bernoulli distributions "this token or another".
    """
    ratio = tokens.log_ratio.detach().exp()
    now, before = tokens.current.detach().exp(), tokens.anchor.exp()
    rises = tokens.advantages > 0
    if divergence == "tv":
        stopped = torch.where(rises, now - before > limit_high, before - now > limit_low)
    else:
        moved = before * (tokens.anchor - tokens.current.detach())
        moved = moved + (1.0 - before) * torch.log((1.0 - before + 1e-8) / (1.0 - now + 1e-8))
        stopped = torch.where(rises, (moved > limit_high) & (now > before), (moved > limit_low) & (now < before))
    weight = (ratio if cap is None else ratio.clamp(max=cap)) * ~stopped
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, stopped, none_of(stopped))


def dppo_tv_ratio(tokens: Tokens, *, limit_low: float, limit_high: float, drift: float) -> LossTerms:
    """The default loss of prime-rl: a ratio masked by total variation, and a squared drift.

    ``L = -M r A + drift (log r)^2`` with M of `dppo` (tv), strict at A = 0 (nothing is masked there).
    """
    ratio = tokens.log_ratio.exp()
    now, before = tokens.current.detach().exp(), tokens.anchor.exp()
    up = (tokens.advantages > 0) & (now - before > limit_high)
    down = (tokens.advantages < 0) & (before - now > limit_low)
    stopped = up | down
    loss = -tokens.advantages * ratio * ~stopped + drift * tokens.log_ratio.square()
    return LossTerms(loss, ratio.detach(), stopped, none_of(stopped))


def clip_cov(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    share: float,
    lowest: float,
    highest: float,
    generator: torch.Generator | None = None,
) -> LossTerms:
    """PPO clip that also detaches a few tokens that would lower the entropy most (arXiv 2505.22617).

    Candidates have a covariance ``(A - mean A)(log p - mean log p)`` between ``lowest`` and ``highest``
    and are not clipped already; at most ``share`` of all tokens are drawn from them. Means and share
    count the tokens given, so this loss wants the whole batch in one micro-batch.
    """
    terms = clip_terms(
        tokens.log_ratio.exp(), tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    covariance = _covariance(tokens)
    candidates = torch.nonzero((covariance > lowest) & (covariance < highest) & ~terms.clipped).flatten()
    wanted = min(len(candidates), max(1, int(share * len(covariance))))
    chosen = candidates[torch.randperm(len(candidates), generator=generator).to(candidates.device)[:wanted]]
    detached = none_of(terms.loss)
    detached[chosen] = True
    return LossTerms(terms.loss * ~detached, terms.ratio, terms.clipped | detached, terms.dual_clipped)


def kl_cov(tokens: Tokens, *, share: float, penalty: float) -> LossTerms:
    """Ratio loss with a KL penalty on the tokens of highest covariance (arXiv 2505.22617).

    ``L = -r A``, plus ``penalty |log r|`` on the ``share`` of tokens with the largest covariance. Wants
    the whole batch in one micro-batch, as `clip_cov`.
    """
    log_ratio = tokens.log_ratio
    ratio = log_ratio.exp()
    loss = -tokens.advantages * ratio
    picked = none_of(loss)
    if len(loss):
        picked[torch.topk(_covariance(tokens), max(1, int(share * len(loss)))).indices] = True
    return LossTerms(loss + penalty * log_ratio.abs() * picked, ratio.detach(), none_of(loss), none_of(loss))


def _covariance(tokens: Tokens) -> Tensor:
    if not len(tokens.current):
        return tokens.advantages.detach()
    now = tokens.current.detach()
    return (tokens.advantages - tokens.advantages.mean()) * (now - now.mean())
