"""Losses that judge each answer against the reference by itself: NCA, BCO, SPPO, APO, KTO."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.preferences.interface import Beta, Pairs, preference_loss


class KtoOptions(Beta):
    desirable_weight: float = Field(default=1.0, ge=0.0, description="Factor of kto on chosen answers.")
    undesirable_weight: float = Field(default=1.0, ge=0.0, description="Factor of kto on rejected answers.")


@preference_loss(options=Beta, source="NCA, arXiv 2402.05369")
def nca_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """``-log sigmoid(c) - ½ log sigmoid(-c) - ½ log sigmoid(-r)`` of the rewards c and r."""
    log_sigmoid = torch.nn.functional.logsigmoid
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


@preference_loss(options=Beta, source="BCO, arXiv 2404.04656, without its reward shift (TRL bco_pair)")
def bco_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """``-log sigmoid(c) - log sigmoid(-r)``: a classifier of chosen against rejected."""
    log_sigmoid = torch.nn.functional.logsigmoid
    return -log_sigmoid(beta * pairs.chosen_ratio) - log_sigmoid(-beta * pairs.rejected_ratio)


@preference_loss(options=Beta, source="SPPO, arXiv 2405.00675, eq. 4.7 with probabilities 1 and 0")
def sppo_hard(pairs: Pairs, *, beta: float) -> Tensor:
    """``(c - 1/(2 beta))² + (r + 1/(2 beta))²`` of the log-ratios c and r."""
    return (pairs.chosen_ratio - 0.5 / beta).square() + (pairs.rejected_ratio + 0.5 / beta).square()


@preference_loss(options=Beta, source="APO, arXiv 2408.06266, eq. 7")
def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """``1 - sigmoid(c) + sigmoid(r)``: for chosen answers that are better than those of the model."""
    return 1.0 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


@preference_loss(options=Beta, source="APO, arXiv 2408.06266, eq. 8")
def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """``sigmoid(c) + 1 - sigmoid(c - r)``: for chosen answers that are worse than those of the model."""
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return torch.sigmoid(chosen) + 1.0 - torch.sigmoid(chosen - rejected)


@preference_loss(options=KtoOptions, source="KTO, arXiv 2402.01306, eq. 7", needs_kl=True, takes_one_answer=True)
def kto(pairs: Pairs, *, beta: float, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """``½ (w_d (1 - sigmoid(beta (c - z))) + w_u (1 - sigmoid(beta (z - r))))``, each answer of a pair by itself.

    Of a row with one answer its term alone, whole. z is the KL of policy and reference, estimated on the batch's prompts with answers to other prompts, and at least 0.
    """
    good = 1.0 - torch.sigmoid(beta * (pairs.chosen_ratio - pairs.kl))
    bad = 1.0 - torch.sigmoid(beta * (pairs.kl - pairs.rejected_ratio))
    has_chosen, has_rejected = (tokens > 0 for tokens in (pairs.chosen_tokens, pairs.rejected_tokens))
    total = desirable_weight * good * has_chosen + undesirable_weight * bad * has_rejected
    return total / (has_chosen.to(total.dtype) + has_rejected.to(total.dtype)).clamp(min=1.0)
