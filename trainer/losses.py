"""Policy-gradient losses on flat [N] tensors of sampled tokens; pure.

A loss returns its value for every token, before aggregation (`trainer/aggregation.py` weighs the
tokens), and what the step reports about them. Another loss is another function in
`trainer/algorithms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp of more is infinity in bfloat16's neighbourhood; such a token is clipped anyway


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One value per sampled token; only ``loss`` carries a gradient."""

    loss: Tensor  # [N]
    ratio: Tensor  # [N] behaviour ratio, current / behaviour
    clipped: Tensor  # [N] bool, the clip took the token's gradient away
    dual_clipped: Tensor  # [N] bool, the dual clip took it away


PolicyLoss = Callable[..., LossTerms]


def ppo_clip(
    current_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    token_tis_cap: float | None = None,
    negative_weight: float = 1.0,
) -> LossTerms:
    """PPO's clipped objective against the policy that sampled (arXiv 1707.06347, 1912.09729).

    With ``r = exp(current - behaviour)``, per token:

        L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        L = min(L, -dual_clip A)                     where A < 0 and a dual clip is set
        L = L * sg(min(1, token_tis_cap / r))        when a cap is set

    The ratio is taken against the behaviour log-probabilities that the engine reported, not against
    a recomputation: it is importance weight and trust region in one, which is what keeps stale data
    safe with one step per batch. The dual clip stops the tokens that do the damage when data are
    stale, failed samples that the policy has since learned to prefer (r large, A < 0).

    Token-level importance truncation (``token_tis_cap``) truncates the same ratio: the gradient of
    a token that is not clipped is ``-A * min(r, cap) * grad(current)`` instead of ``-A * r *
    grad(current)``. It never multiplies a second weight onto the ratio.

    Differs from the papers in: (1) the anchor is the behaviour policy, possibly several versions
    old; (2) ``negative_weight`` scales negative advantages; (3) the log-ratio is limited to ±20.

    Args:
        current_logprobs: [N] with gradient.
        behaviour_logprobs: [N] as the engine reported them, at the same temperature.
        advantages: [N], the trajectory's advantage repeated for its tokens.
        clip_low: How far the ratio may fall below 1 before the clip.
        clip_high: How far it may rise above 1.
        dual_clip: Bound (> 1) of the ratio for negative advantages; None: no bound.
        token_tis_cap: Bound of the importance weight in the gradient; None: no bound.
        negative_weight: Factor on negative advantages.

    Returns:
        The loss of every token and which clip applied.
    """
    advantages = torch.where(advantages < 0, advantages * negative_weight, advantages)
    log_ratio = (current_logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    with torch.no_grad():
        clipped = bounded > free
        dual_clipped = torch.zeros_like(clipped)
        if dual_clip is not None:
            dual_clipped = (advantages < 0) & (-dual_clip * advantages < loss)
    if dual_clip is not None:
        loss = torch.where(dual_clipped, -dual_clip * advantages, loss)
    if token_tis_cap is not None:
        loss = loss * (token_tis_cap / ratio.detach()).clamp(max=1.0)
    return LossTerms(loss, ratio.detach(), clipped & ~dual_clipped, dual_clipped)
