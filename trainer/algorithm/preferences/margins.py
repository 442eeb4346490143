"""Losses of the margin between the implicit rewards of a pair, DPO and its relatives; and those without a reference policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.preferences.interface import Beta, Pairs, Smoothing, preference_loss


class IpoOptions(Beta):
    ipo_length: Literal["mean", "sum"] = Field(
        default="mean",
        description="Log-probabilities of ipo: mean over an answer's tokens (TRL), or their sum (the paper's eq. 17, OpenRLHF).",
    )


class DiscopopOptions(Beta):
    discopop_tau: float = Field(default=0.05, gt=0.0, description="Temperature of discopop's mix of its two losses.")


def smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return ``-(1 - e) log sigmoid(x) - e log sigmoid(-x)``."""
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(1.0 - label_smoothing) * log_sigmoid(logits) - label_smoothing * log_sigmoid(-logits)


@preference_loss(
    options=Smoothing, source="DPO, arXiv 2305.18290; smoothed: cDPO, arXiv 2305.18290v3", uses_divergence=True
)
def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Logistic loss of the margin m, smoothed by the label.

    ``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``.
    """
    return smoothed(beta * pairs.margin, label_smoothing)


@preference_loss(options=Beta, source="LN-DPO; TRL 1.16 sigmoid_norm", uses_divergence=True)
def sigmoid_norm(pairs: Pairs, *, beta: float) -> Tensor:
    """``-log sigmoid(beta m)`` of the margin of rewards per token."""
    return smoothed(beta * pairs.margin_per_token, 0.0)


@preference_loss(options=Beta, source="SLiC, arXiv 2305.10425; RSO, arXiv 2309.06657", uses_divergence=True)
def hinge(pairs: Pairs, *, beta: float) -> Tensor:
    """``max(0, 1 - beta m)``."""
    return torch.relu(1.0 - beta * pairs.margin)


@preference_loss(options=IpoOptions, source="IPO, arXiv 2310.12036, eq. 17", uses_divergence=True)
def ipo(pairs: Pairs, *, beta: float, ipo_length: str = "mean") -> Tensor:
    """``(m - 1 / (2 beta))²``; m of rewards per token, which the authors confirmed, or of their sums."""
    margin = pairs.margin if ipo_length == "sum" else pairs.margin_per_token
    return (margin - 1.0 / (2.0 * beta)).square()


@preference_loss(options=Smoothing, source="Robust DPO, arXiv 2403.00409", uses_divergence=True)
def robust(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``(-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2 e)``: unbiased for labels flipped at rate e."""
    log_sigmoid, logits, e = torch.nn.functional.logsigmoid, beta * pairs.margin, label_smoothing
    return (-(1.0 - e) * log_sigmoid(logits) + e * log_sigmoid(-logits)) / (1.0 - 2.0 * e)


@preference_loss(options=Smoothing, source="EXO, arXiv 2402.00856, eq. 16", uses_divergence=True)
def exo_pair(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``KL((sigmoid(beta m), sigmoid(-beta m)) || (1 - e, e))``: the reverse KL to the labels; e must be above 0."""
    log_sigmoid, logits = torch.nn.functional.logsigmoid, beta * pairs.margin
    labels = torch.tensor([1.0 - label_smoothing, label_smoothing], dtype=logits.dtype).log()
    wins, loses = log_sigmoid(logits), log_sigmoid(-logits)
    return wins.exp() * (wins - labels[0]) + loses.exp() * (loses - labels[1])


@preference_loss(options=DiscopopOptions, source="DiscoPOP, arXiv 2406.08414, eq. 5", uses_divergence=True)
def discopop(pairs: Pairs, *, beta: float, discopop_tau: float) -> Tensor:
    """``-(1 - w) log sigmoid(x) + w exp(-x)`` with x = beta m and w = sigmoid(x / tau)."""
    logits = beta * pairs.margin
    weight = torch.sigmoid(logits / discopop_tau)
    return -torch.nn.functional.logsigmoid(logits) * (1.0 - weight) + torch.exp(-logits) * weight


# AOT: the chosen answers of a batch as a whole are to be better than the rejected ones. Values are sorted, so the loss of one
# pair depends on the whole batch, over all micro-batches and ranks.


@preference_loss(options=Smoothing, source="AOT, arXiv 2406.05882, paired", couples_pairs=True)
def aot(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta d)`` of the differences d between the sorted margins of policy and reference."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.reference_chosen - pairs.reference_rejected).sort().values
    return smoothed(beta * (policy - reference), label_smoothing)


@preference_loss(options=Smoothing, source="AOT, arXiv 2406.05882, unpaired", couples_pairs=True)
def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta d)`` of the differences d between the sorted log-ratios of chosen and of rejected answers."""
    delta = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed(beta * delta, label_smoothing)


class CpoOptions(Smoothing):
    cpo_nll: float = Field(default=1.0, ge=0.0, description="Weight of cpo's cross-entropy of the chosen answers.")


class SimpoOptions(Smoothing):
    simpo_gamma: float = Field(default=0.5, ge=0.0, description="Margin that simpo asks for.")


@preference_loss(
    source="cross-entropy of the chosen answers; RPO, arXiv 2404.19733, beside another loss", needs_reference=False
)
def sft(pairs: Pairs) -> Tensor:
    """Minus the log-probability of the chosen answers, per token of all chosen answers of the batch."""
    return pairs.chosen_nll


@preference_loss(options=CpoOptions, source="CPO, arXiv 2401.08417", needs_reference=False)
def cpo(pairs: Pairs, *, beta: float, cpo_nll: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta (log p(chosen) - log p(rejected)))``, and the cross-entropy of the chosen answers."""
    return smoothed(beta * (pairs.chosen - pairs.rejected), label_smoothing) + cpo_nll * pairs.chosen_nll


@preference_loss(options=SimpoOptions, source="SimPO, arXiv 2405.14734", needs_reference=False, averages=True)
def simpo(pairs: Pairs, *, beta: float, simpo_gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta (a - b) - gamma)`` of the mean log-probabilities per token a and b; the paper's beta is 2 to 10."""
    difference = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return smoothed(beta * difference - simpo_gamma, label_smoothing)


@preference_loss(options=Beta, source="ORPO, arXiv 2403.07691", needs_reference=False, averages=True)
def orpo(pairs: Pairs, *, beta: float) -> Tensor:
    """``-beta log sigmoid(log odds(chosen) - log odds(rejected))``, and the cross-entropy of the chosen answers.

    The odds are those of the mean log-probability per token. The cross-entropy is that of the answers, as in the paper; TRL's
    is that of prompt and answer.
    """

    def log_odds(mean: Tensor) -> Tensor:
        return mean - torch.log(-torch.expm1(mean))

    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    ratio = torch.nn.functional.logsigmoid(log_odds(chosen) - log_odds(rejected))
    return pairs.chosen_nll - beta * ratio
