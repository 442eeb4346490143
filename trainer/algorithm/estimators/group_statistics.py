"""Mean, size and standard deviation of each trajectory's group; pure."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes
from penstock.trainer.algorithm.lazy_torch import Tensor, torch

STD_EPSILON = 1e-6  # verl's; TRL uses 1e-4
_FLAT = 1e-9  # rewards closer together than this, relative to their size, are one and the same reward


def group_mean(outcomes: Outcomes, values: Tensor) -> Tensor:
    """Return the mean of values [B] over each member's group, [B]."""
    index, count = outcomes.group_index
    sums = values.new_zeros(count).index_add(0, index, values)
    sizes = values.new_zeros(count).index_add(0, index, torch.ones_like(values))
    return (sums / sizes.clamp(min=1.0))[index]


def group_sizes(outcomes: Outcomes) -> Tensor:
    """Return the number of trajectories of each member's group, [B]."""
    index, count = outcomes.group_index
    ones = torch.ones_like(outcomes.rewards)
    return ones.new_zeros(count).index_add(0, index, ones)[index]


def rewards_differ(outcomes: Outcomes) -> Tensor:
    """Return which trajectories are in a group whose rewards differ, [B] bool."""
    index, count = outcomes.group_index
    rewards = outcomes.rewards
    top = rewards.new_full((count,), float("-inf")).scatter_reduce(0, index, rewards, "amax")
    low = rewards.new_full((count,), float("inf")).scatter_reduce(0, index, rewards, "amin")
    size = rewards.new_zeros(count).scatter_reduce(0, index, rewards.abs(), "amax")
    return ((top - low) > _FLAT * size)[index]


def group_std(outcomes: Outcomes) -> Tensor:
    """Return the unbiased standard deviation of each member's group, [B]; 0 for a group of one."""
    centred = outcomes.rewards - group_mean(outcomes, outcomes.rewards)
    sizes = group_sizes(outcomes)
    return (group_mean(outcomes, centred.square()) * sizes / (sizes - 1.0).clamp(min=1.0)).sqrt()
