"""Ratios at four levels and the divergences that they estimate; pure.

With a per-token log-ratio of spread sigma and T tokens:

| level       | log-weight of a sequence | its spread      |                                                  |
|-------------|--------------------------|-----------------|--------------------------------------------------|
| `token`     | that of the token        | sigma           |                                                  |
| `sequence`  | sum                      | sigma sqrt(T)   | unbiased; collapses with length                  |
| `geometric` | mean                     | sigma / sqrt(T) | blind to staleness when T is large               |
| `root`      | sum / sqrt(T)            | sigma           | the same meaning at every length (Penstock only) |
"""

from __future__ import annotations

from typing import Literal

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, Sequences

Level = Literal["token", "sequence", "geometric", "root"]


def log_weights(log_ratio: Tensor, sequences: Sequences, level: Level) -> Tensor:
    """Return the log-weight at one level for every token, [N], limited to ±20.

    Args:
        log_ratio: [N] log of the newer over the older policy.
        sequences: Which token belongs where.
        level: See the table above.
    """
    log_ratio = log_ratio.detach()
    if level == "token":
        combined = log_ratio
    elif level == "geometric":
        combined = sequences.spread(sequences.mean(log_ratio))
    else:
        total = sequences.sum(log_ratio)
        if level == "root":
            total = total / sequences.lengths(log_ratio).clamp(min=1.0).sqrt()
        combined = sequences.spread(total)
    return combined.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def divergence(log_ratio: Tensor, form: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return -x, x^2 / 2 or exp(x) - 1 - x of a log-ratio x = log(newer / older), [N]."""
    log_ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match form:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return log_ratio.expm1() - log_ratio


def interpolated(behaviour: Tensor, current: Tensor, ages: Tensor) -> Tensor:
    """Return log-probabilities between sampler and current policy, [N]: A-3PO's proximal policy (arXiv 2512.06547).

    ``a log behaviour + (1 - a) log current`` with a = 1 / age, and a = 0 for a token of age 0.
    """
    share = torch.where(ages >= 1, 1.0 / ages.clamp(min=1).to(current.dtype), 0.0)
    return current + share * (behaviour - current)


def learning_rate_factor(effective: float, *, power: float = 0.5, floor: float = 0.0) -> float:
    """Return the factor on a step's learning rate: the effective share to a power (VCPO, arXiv 2602.17616)."""
    return max(min(effective, 1.0) ** power, floor)


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
