"""The effective sample size of a batch, and the learning rate that it scales; not registered: it weighs no token."""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import Tensor, torch


def effective_share(log_weight: Tensor) -> Tensor:
    """Return the effective sample size as a share, (sum w)^2 / (n sum w^2), scalar in [1/n, 1]; 1 for no sample."""
    if not len(log_weight):
        return torch.ones((), dtype=log_weight.dtype)
    weights = (log_weight.detach() - log_weight.detach().max()).exp()
    return weights.sum().square() / (len(weights) * weights.square().sum())


def learning_rate_factor(effective: float, *, power: float = 0.5, floor: float = 0.0) -> float:
    """Return the factor on a step's learning rate: the effective share to a power (VCPO, arXiv 2602.17616)."""
    return max(min(effective, 1.0) ** power, floor)
