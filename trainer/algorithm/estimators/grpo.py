"""GRPO: rewards relative to the group."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import (
    STD_EPSILON,
    Outcomes,
    StdNormalisation,
    advantage_estimator,
    group_mean,
    group_std,
    rewards_differ,
)
from penstock.trainer.algorithm.lazy_torch import Tensor, torch


@advantage_estimator(
    options=StdNormalisation,
    source="arXiv 2402.03300",
    presets={"grpo": {"advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "aggregation": "token-mean"}},
    group_relative=True,
)
def grpo(outcomes: Outcomes, *, normalise_by_std: bool = True) -> Tensor:
    """Subtract the group's mean reward and divide by its standard deviation.

    ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)`` over the group, with the unbiased standard deviation; without the
    division: Dr. GRPO, arXiv 2503.20783. A group of one, or one whose rewards are all equal, carries no signal: its
    advantages are 0 (in verl, a group of one gets its reward as advantage).

    Returns:
        [B] advantages; they sum to 0 in every group.
    """
    centred = outcomes.rewards - group_mean(outcomes, outcomes.rewards)
    scaled = centred / (group_std(outcomes) + STD_EPSILON) if normalise_by_std else centred
    return torch.where(rewards_differ(outcomes), scaled, torch.zeros_like(scaled))
