"""GDPO: every part of the reward normalised by itself; not registered, since it reads the parts of rewards."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.grpo import grpo
from penstock.trainer.algorithm.estimators.interface import Outcomes
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.reward_shaping import whiten


def gdpo(parts: list[Tensor], outcomes: Outcomes, *, weights: list[float]) -> Tensor:
    """Normalise every part of the reward in its group, sum them and whiten the sum, [B] (arXiv 2601.05242).

    Args:
        parts: [B] each, the parts of the reward.
        outcomes: Groups and lengths; its rewards are not read.
        weights: One for each part.
    """
    total = torch.zeros_like(outcomes.rewards)
    for part, weight in zip(parts, weights, strict=True):
        total = total + weight * grpo(Outcomes(part.to(total.dtype), outcomes.groups, outcomes.lengths))
    return whiten(total, weights=outcomes.lengths)
