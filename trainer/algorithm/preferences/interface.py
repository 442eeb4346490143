"""What a file that holds a preference loss needs: `preference_loss`, `Pairs`, `Options`.

A user-defined loss, here in a file ``my_losses.py``, chosen by ``dpo.loss = "my_losses.py:squared"``:

    @preference_loss(options=Beta, source="arXiv 0000.00000")
    def squared(pairs: Pairs, *, beta: float) -> Tensor:
        return (beta * pairs.margin - 1.0).square()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field

from penstock.protocol.extensions import Registry
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.parts import Options, OptionsT_co, Part, decorator

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
_MAX_EXPONENT = 80.0  # exp of it is finite in float32
_NEAR_ONE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """P pairs of answers to one prompt each; every tensor is [P]."""

    chosen: Tensor  # log-probability of the whole answer, with gradient
    rejected: Tensor
    reference_chosen: Tensor  # the same under the reference; 0 for losses without one
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_nll: Tensor  # its mean over pairs is the cross-entropy per token of all chosen answers of the batch
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5  # of the alpha divergence
    kl: Tensor | float = 0.0  # estimate of the KL of policy and reference on other answers, for kto

    @property
    def chosen_ratio(self) -> Tensor:
        """Log-ratio of policy and reference on the chosen answer."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """Log-ratio of policy and reference on the rejected answer."""
        return self.rejected - self.reference_rejected

    @property
    def chosen_score(self) -> Tensor:
        """Implicit reward of the chosen answer: f'(ratio) of the divergence; its log for the reverse KL."""
        return divergence_score(self.chosen_ratio, self.divergence, self.alpha)

    @property
    def rejected_score(self) -> Tensor:
        """Implicit reward of the rejected answer."""
        return divergence_score(self.rejected_ratio, self.divergence, self.alpha)

    @property
    def margin(self) -> Tensor:
        """Implicit reward of the chosen answer over the rejected one."""
        return self.chosen_score - self.rejected_score

    @property
    def margin_per_token(self) -> Tensor:
        """The margin of rewards that are divided by their answer's length."""
        return self.chosen_score / self.chosen_tokens.clamp(min=1) - self.rejected_score / self.rejected_tokens.clamp(
            min=1
        )


def divergence_score(log_ratio: Tensor, form: Divergence, alpha: float) -> Tensor:
    """Return f'(t) of a log-ratio log t (f-DPO, arXiv 2309.16240), up to a constant that cancels in a margin.

    reverse KL: log t; forward KL: 1 - 1/t; JS: log(2 t / (t + 1)); alpha: (t^(alpha - 1) - 1) / (alpha - 1).
    """
    if form == "forward_kl":
        return 1.0 - torch.exp(-log_ratio)
    if form == "js_divergence":
        return torch.nn.functional.logsigmoid(log_ratio) + torch.log(torch.tensor(2.0, dtype=log_ratio.dtype))
    if form == "alpha_divergence" and abs(alpha - 1.0) >= _NEAR_ONE:
        power = ((alpha - 1.0) * log_ratio).clamp(max=_MAX_EXPONENT)
        return (torch.exp(power) - 1.0) / (alpha - 1.0)
    return log_ratio


class Beta(Options):
    """How strongly the policy is held to the reference."""

    beta: float = Field(
        default=0.1,
        gt=0.0,
        description="Scale of the implicit reward: higher values hold the policy closer to the reference.",
    )


class Smoothing(Beta):
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=0.5,
        description="Share of the labels that are taken to be flipped. TRL reads it in robust, exo_pair and aot only; here "
        "sigmoid, cpo and simpo read it too.",
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class PreferenceLoss(Part[OptionsT_co]):
    """A loss on pairs: ``fn(pairs, **options)`` returns one value per pair."""

    needs_reference: bool = True  # it compares with the reference policy
    couples_pairs: bool = False  # the loss of a pair depends on the other pairs of the batch
    uses_divergence: bool = False  # it reads scores, so that dpo.divergence has an effect
    needs_kl: bool = False  # it reads the KL that is estimated on the batch
    averages: bool = False  # it reads means over an answer's tokens; the rewards are reported so
    takes_one_answer: bool = False  # it judges each answer by itself, also one whose counterpart has 0 tokens


preference_loss = decorator(PreferenceLoss)
"""Make a function a preference loss of the function's name; the arguments are the fields of `PreferenceLoss`."""


@dataclass(frozen=True, slots=True)
class WeighedLoss:
    loss: PreferenceLoss[Any]
    options: Mapping[str, Any]
    weight: float = 1.0


def combined(pairs: Pairs, losses: Sequence[WeighedLoss]) -> Tensor:
    total = torch.zeros_like(pairs.chosen)
    for weighed in losses:
        total = total + weighed.weight * weighed.loss(pairs, **weighed.options)
    return total


PREFERENCE_LOSSES: Final[Registry[PreferenceLoss[Any]]] = Registry(
    "preference loss",
    PreferenceLoss,
    package="penstock.trainer.algorithm.preferences",
    group="penstock.preference_losses",
)
