"""From rewards to advantages: what each trajectory is credited with, one function per estimator; pure.

Every estimator maps the rewards of one group to one advantage per trajectory, which the loss spreads
over the trajectory's sampled tokens. Another estimator is another function in `trainer/algorithms.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GRPO_EPSILON = 1e-6  # verl's; TRL uses 1e-4
_FLAT = 1e-9  # rewards closer together than this, relative to their size, are one and the same reward

AdvantageEstimator = Callable[..., Tensor]


def grpo(rewards: Tensor, *, normalise_by_std: bool = True) -> Tensor:
    """Group-relative advantages (arXiv 2402.03300; without the division: Dr. GRPO, arXiv 2503.20783).

    ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)`` over the group, with the unbiased standard deviation.
    A group of one, or one whose rewards are all equal, teaches nothing: its advantages are 0, never
    NaN and never rounding noise blown up by the division (verl gives a group of one its own reward).

    Args:
        rewards: [G] finite rewards of one group.
        normalise_by_std: Divide by the group's standard deviation.

    Returns:
        [G] float64 advantages; they sum to 0.
    """
    rewards = rewards.to(torch.float64)
    spread = rewards.max() - rewards.min()
    if len(rewards) < 2 or spread <= _FLAT * rewards.abs().max():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(correction=1) + GRPO_EPSILON) if normalise_by_std else centred
