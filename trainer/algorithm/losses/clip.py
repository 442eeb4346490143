"""Clips that several losses share: PPO's clip of any ratio, and the stop in the direction of the advantage; pure."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import LossTerms, none_of


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


def directional_stop(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return where a token has already moved beyond the clip in the direction its advantage pushes, [N] bool."""
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
