"""Losses without a reference policy: CPO, SimPO, ORPO, and the cross-entropy of the chosen answers."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.preferences.interface import Beta, Pairs, Smoothing, preference_loss
from penstock.trainer.algorithm.preferences.margins import smoothed


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
