"""REINFORCE without a baseline, and the return of each token that it is about."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import Sequences


@advantage_estimator(source="Williams 1992")
def reinforce(outcomes: Outcomes) -> Tensor:
    """Return the reward itself, [B]."""
    return outcomes.rewards.clone()


def reward_to_go(rewards: Tensor, sequences: Sequences, *, gamma: float = 1.0) -> Tensor:
    """Return the discounted sum of this and all later rewards [N] of the sequence, [N]."""
    rows, _ = sequences.to_rows(rewards)
    running = rows.new_zeros(len(rows))
    returns = torch.empty_like(rows)
    for place in range(rows.shape[1] - 1, -1, -1):
        running = rows[:, place] + gamma * running
        returns[:, place] = running
    return sequences.from_rows(returns)
