"""No advantage from rewards: the loss has only what is added to it, such as the KL to a teacher."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor, torch


@advantage_estimator(source="thinkingmachines.ai/blog/on-policy-distillation")
def zero(outcomes: Outcomes) -> Tensor:
    """Return 0 whatever the rewards are, [B]."""
    return torch.zeros_like(outcomes.rewards)
