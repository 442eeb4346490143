"""VESPO: a gamma-shaped weight on the product of a sequence's ratios."""

from __future__ import annotations

import math

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import torch
from penstock.trainer.algorithm.losses.interface import MAX_LOG_RATIO, LossTerms, Options, Tokens, none_of, policy_loss


class VespoOptions(Options):
    """Options of `vespo`; their defaults are verl's."""

    vespo_k_positive: float = Field(default=2.0, ge=0.0, description="vespo: power of the weight where A >= 0.")
    vespo_lambda_positive: float = Field(default=3.0, ge=0.0, description="vespo: decay of the weight where A >= 0.")
    vespo_k_negative: float = Field(default=3.0, ge=0.0, description="vespo: power of the weight where A < 0.")
    vespo_lambda_negative: float = Field(default=2.0, ge=0.0, description="vespo: decay of the weight where A < 0.")


@policy_loss(options=VespoOptions, source="arXiv 2602.10693")
def vespo(
    tokens: Tokens,
    *,
    vespo_k_positive: float,
    vespo_lambda_positive: float,
    vespo_k_negative: float,
    vespo_lambda_negative: float,
) -> LossTerms:
    """Weigh a sequence by a gamma-shaped function of the product of its ratios.

    ``L = -phi(w) A log p`` with ``phi(w) = w^k exp(lambda (1 - w))``, so that phi(1) = 1; detached.
    """
    log_weight = tokens.sequences.sum(tokens.log_ratio.detach()).clamp(math.log(1e-8), MAX_LOG_RATIO)
    log_weight = tokens.sequences.spread(log_weight)
    weight = log_weight.exp()
    rises = tokens.advantages >= 0
    power = torch.where(rises, vespo_k_positive, vespo_k_negative).to(weight.dtype)
    decay = torch.where(rises, vespo_lambda_positive, vespo_lambda_negative).to(weight.dtype)
    phi = (decay + power * log_weight - decay * weight).exp()
    return LossTerms(-phi * tokens.advantages * tokens.current, weight, none_of(weight), none_of(weight))
