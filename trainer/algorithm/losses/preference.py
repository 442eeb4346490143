"""Losses on pairs and on labelled answers: DPO, IPO, hinge, KTO, ORPO, CPO, SimPO; pure.

Everything takes sums of log-probabilities over an answer's tokens, [P] for P pairs, and returns one
loss per pair (or per answer), not yet averaged.
"""

from __future__ import annotations

from typing import Literal

from penstock.trainer.algorithm.lazy_torch import Tensor, torch

PairLoss = Literal["sigmoid", "hinge", "ipo", "simpo"]


def pairwise(
    margin: Tensor, *, form: PairLoss, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """Return the loss of a preference from its margin, [P].

    | form      | loss                                            | source                       |
    |-----------|-------------------------------------------------|------------------------------|
    | `sigmoid` | -log sigmoid(beta m), smoothed by the label     | DPO, arXiv 2305.18290        |
    | `hinge`   | relu(1 - beta m)                                | SLiC, arXiv 2305.10425       |
    | `ipo`     | (m - 1 / (2 beta))^2                            | IPO, arXiv 2310.12036        |
    | `simpo`   | -log sigmoid(beta m - gamma)                    | SimPO, arXiv 2405.14734      |

    The margin m is ``log p(chosen) - log p(rejected)`` minus the same of the reference (DPO) or not (CPO);
    of sums over tokens, for SimPO of means. TRL averages IPO's over tokens too (`answer_logprobs`), OpenRLHF
    and AReaL take sums; here the caller decides.
    """
    if form == "hinge":
        return torch.nn.functional.relu(1.0 - beta * margin)
    if form == "ipo":
        return (margin - 1.0 / (2.0 * beta)).square()
    shifted = beta * margin - (gamma if form == "simpo" else 0.0)
    return (
        -torch.nn.functional.logsigmoid(shifted) * (1.0 - label_smoothing)
        - torch.nn.functional.logsigmoid(-shifted) * label_smoothing
    )


def odds_ratio(chosen_mean: Tensor, rejected_mean: Tensor, *, beta: float) -> Tensor:
    """Return ORPO's penalty, to be added to the cross-entropy of the chosen answer, [P] (arXiv 2403.07691).

    ``-beta log sigmoid(log odds(chosen) - log odds(rejected))`` of the mean log-probabilities per token.
    """

    def log_odds(logprob: Tensor) -> Tensor:
        return logprob - torch.log1p(-logprob.exp())

    return -beta * torch.nn.functional.logsigmoid(log_odds(chosen_mean) - log_odds(rejected_mean))


def kto(
    margins: Tensor,
    desirable: Tensor,
    baseline: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    form: Literal["kto", "apo_zero_unpaired"] = "kto",
) -> Tensor:
    """Return the loss of Kahneman-Tversky optimisation on labelled answers, [P] (arXiv 2402.01306).

    ``1 - sigmoid(beta (m - z))`` for good answers, ``1 - sigmoid(beta (z - m))`` for bad ones; z is the
    estimated KL of policy and reference, not below 0. `apo_zero_unpaired` (arXiv 2408.06266) has no z:
    ``1 - sigmoid(beta m)`` and ``sigmoid(beta m)``.

    Args:
        margins: [P] log p - log p of the reference, sums over tokens, with gradient.
        desirable: [P] bool.
        baseline: Estimate of the KL, detached.
        beta: Strength.
        desirable_weight: Factor on good answers.
        undesirable_weight: Factor on bad ones.
        form: Which of the two.
    """
    zero = torch.as_tensor(baseline, dtype=margins.dtype, device=margins.device).clamp(min=0.0)
    if form == "apo_zero_unpaired":
        zero = torch.zeros_like(zero)
    sign = torch.where(desirable, 1.0, -1.0).to(margins.dtype)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(margins.dtype)
    return weight * (1.0 - torch.sigmoid(beta * sign * (margins - zero)))
