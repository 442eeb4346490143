"""The factor on negative advantages; not registered, since it comes before the loss."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import Tensor, torch


def weigh_negatives(advantages: Tensor, ages: Tensor, *, fresh: float = 1.0, stale: float = 1.0) -> Tensor:
    """Scale the negative advantages, [N], by one factor for fresh tokens and another for stale ones.

    A success stays a success whichever version sampled it; a failed sample lowers tokens that the policy may since
    have learned to prefer, so it counts less when it is stale.

    Args:
        advantages: [N].
        ages: [N] versions between sampling and training.
        fresh: Factor where the age is 0.
        stale: Factor where it is not.
    """
    factor = torch.where(ages > 0, stale, fresh).to(advantages.dtype)
    return torch.where(advantages < 0, advantages * factor, advantages)
