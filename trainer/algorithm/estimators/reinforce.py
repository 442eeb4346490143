"""REINFORCE without a baseline."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor


@advantage_estimator(source="Williams 1992")
def reinforce(outcomes: Outcomes) -> Tensor:
    """Return the reward itself, [B]."""
    return outcomes.rewards.clone()
