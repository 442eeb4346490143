"""Which advantage estimator and which loss an ``algorithm.name`` stands for: the door for the next ones."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.advantages import AdvantageEstimator, grpo
from trainer.losses import PolicyLoss, ppo_clip


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The two rules that make an algorithm."""

    advantages: AdvantageEstimator
    loss: PolicyLoss


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(advantages=grpo, loss=ppo_clip),
}
