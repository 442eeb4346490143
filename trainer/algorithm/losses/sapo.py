"""SAPO: a sigmoid gate instead of a clip."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.lazy_torch import torch
from penstock.trainer.algorithm.losses.interface import GRPO, LossTerms, Options, Tokens, none_of, policy_loss


class SapoOptions(Options):
    tau_positive: float = Field(default=1.0, gt=0.0, description="sapo: steepness of the gate where A > 0.")
    tau_negative: float = Field(default=1.05, gt=0.0, description="sapo: steepness of the gate elsewhere.")


@policy_loss(
    options=SapoOptions,
    source="arXiv 2511.20347",
    presets={
        "sapo": {
            **GRPO, "loss": "sapo", "tau_positive": 1.0, "tau_negative": 1.05, "aggregation": "seq-mean-token-mean",
        }
    },
)  # fmt: skip
def sapo(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> LossTerms:
    """Gate the ratio with a sigmoid (soft adaptive policy optimisation).

    ``L = -A sigmoid(tau (r - 1)) 4 / tau`` with ``tau_positive`` where A > 0 and ``tau_negative``
    elsewhere. The paper, verl and TRL average by sequence (`seq-mean-token-mean`), AReaL by token.
    """
    ratio = tokens.log_ratio.exp()
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    loss = -tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return LossTerms(loss, ratio.detach(), none_of(loss), none_of(loss))
