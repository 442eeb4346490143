"""What a step minimises: from log-probabilities of a micro-batch to a loss and the sums it reports; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.batch import MicroBatch
from trainer.losses import PolicyLoss


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss of one micro-batch, already divided by the whole batch's denominators.

    ``sums`` add up over micro-batches and ranks; ``maxima`` are maximised over them.
    """

    loss: Tensor  # scalar with gradient
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


Objective = Callable[[Tensor, MicroBatch], Outcome]


def policy_gradient(policy_loss: PolicyLoss, options: Mapping[str, Any]) -> Objective:
    """Return the objective of reinforcement learning with a loss of `trainer/losses.py`.

    Its sums: ``tokens``, ``clipped``, ``dual_clipped``, ``ratio``, ``ratio_squared`` (for the
    effective sample size), ``kl_k3`` (estimates KL(behaviour || current), non-negative by term) and
    ``surprise`` (minus the behaviour log-probability: its mean estimates the entropy of what sampled).
    """

    def objective(logprobs: Tensor, batch: MicroBatch) -> Outcome:
        terms = policy_loss(logprobs, batch.behaviour_logprobs, batch.advantages, **options)
        ratio = terms.ratio
        return Outcome(
            loss=(terms.loss * batch.weights).sum(),
            sums={
                "tokens": torch.tensor(float(len(ratio))),
                "clipped": terms.clipped.sum(),
                "dual_clipped": terms.dual_clipped.sum(),
                "ratio": ratio.sum(),
                "ratio_squared": ratio.square().sum(),
                "kl_k3": (ratio - 1.0 - ratio.log()).sum(),
                "surprise": -batch.behaviour_logprobs.sum(),
            },
            maxima={"ratio": ratio.max() if len(ratio) else torch.tensor(0.0)},
        )

    return objective


def cross_entropy(logprobs: Tensor, batch: MicroBatch) -> Outcome:
    """The objective of supervised fine-tuning: minus the log-probability of the completion's tokens."""
    return Outcome(
        loss=-(logprobs * batch.weights).sum(),
        sums={"tokens": torch.tensor(float(len(logprobs)))},
        maxima={},
    )
