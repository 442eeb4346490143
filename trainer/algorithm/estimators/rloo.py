"""RLOO: the mean of the others as baseline."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator, group_mean, group_sizes
from penstock.trainer.algorithm.lazy_torch import Tensor


@advantage_estimator(
    source="arXiv 2402.14740",
    presets={"rloo": {"advantage": "rloo", "loss": "ppo_clip", "aggregation": "seq-mean-token-sum"}},
    group_relative=True,
)
def rloo(outcomes: Outcomes) -> Tensor:
    """Subtract the mean reward of the group's other members, [B]; a group of one gets 0.

    In verl, a group of one gets its reward as advantage, which pushes every such sample up or down unseen.
    """
    sizes = group_sizes(outcomes)
    centred = outcomes.rewards - group_mean(outcomes, outcomes.rewards)
    return centred * sizes / (sizes - 1.0).clamp(min=1.0)
