"""Score-function losses, ``-sg(w) A log p``: the ratio is a detached weight; pure."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, LossTerms, Tokens, none_of


def reinforce(tokens: Tokens) -> LossTerms:
    """The plain policy gradient, ``L = -A log p`` (also GPG's loss, arXiv 2504.02546): on-policy data only."""
    ratio = tokens.log_ratio.detach().exp()
    return LossTerms(-tokens.advantages * tokens.current, ratio, none_of(ratio), none_of(ratio))


def cispo(tokens: Tokens, *, cap: float, floor: float = 0.0) -> LossTerms:
    """Clipped importance-sampling weights: no token loses its gradient (MiniMax-M1, arXiv 2506.13585).

    ``L = -sg(clamp(r, floor, cap)) A log p``, token mean. ``cap`` is absolute: verl's ``clip_ratio_high``
    of 3.0 and TRL's ``epsilon_high`` of 4.0 are both cap = 4. ScaleRL found caps 4 to 8 equal.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(floor, cap)
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, none_of(ratio), ratio > cap)


def minirl(tokens: Tokens, *, clip_low: float, clip_high: float, cap: float) -> LossTerms:
    """Qwen's MiniRL (arXiv 2512.01374): truncated weight to the sampler, directional mask to the anchor.

    ``L = -M sg(min(current / behaviour, cap)) A log p``; M is 0 where A > 0 and r > 1 + clip_high or
    A < 0 and r < 1 - clip_low, with r = current / anchor. Mean over sequences of sums over tokens,
    advantages without the division by the standard deviation.
    """
    ratio = tokens.log_ratio.detach().exp()
    stopped = directional_stop(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    to_sampler = (tokens.current.detach() - tokens.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = to_sampler.clamp(max=cap) * ~stopped
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, stopped, none_of(stopped))


def topr_token(tokens: Tokens, *, high: float = 1.0) -> LossTerms:
    """TOPR with the ratio of each token instead of the sequence's product, as ROLL has it.

    ``L = -w A log p``, w = 1 where A >= 0, the ratio limited to [0, high] where A < 0.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = torch.where(tokens.advantages < 0, ratio.clamp(max=high), torch.ones_like(ratio))
    return LossTerms(
        -weight * tokens.advantages * tokens.current, ratio, none_of(ratio), (tokens.advantages < 0) & (ratio > high)
    )


def double_sided(tokens: Tokens, *, clip_low: float, clip_high: float) -> LossTerms:
    """Direct double-sided importance sampling (GLM-5, arXiv 2602.15763).

    ``L = -sg(f) A log p`` with f = current / anchor inside (1 - clip_low, 1 + clip_high) and 0 outside,
    whatever the sign of the advantage. The paper's band is not known to us.
    """
    ratio = tokens.log_ratio.detach().exp()
    outside = (ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high)
    return LossTerms(-ratio * ~outside * tokens.advantages * tokens.current, ratio, outside, none_of(outside))


def dro(tokens: Tokens, *, beta: float) -> LossTerms:
    """Policy gradient with a quadratic drift to the anchor (Kimi k1.5 and DRO, arXiv 2501.12599).

    ``L = -A log p + beta / 2 (log r)^2``.
    """
    log_ratio = tokens.log_ratio
    loss = -tokens.advantages * tokens.current + 0.5 * beta * log_ratio.square()
    return LossTerms(loss, log_ratio.detach().exp(), none_of(loss), none_of(loss))


def directional_stop(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return where a token has already moved beyond the clip in the direction its advantage pushes, [N] bool."""
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
