"""GPG: rare rewards count more."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator, group_mean
from penstock.trainer.algorithm.lazy_torch import Tensor


@advantage_estimator(
    source="arXiv 2504.02546",
    presets={"gpg": {"advantage": "gpg", "loss": "ppo_clip", "aggregation": "token-mean"}},
    group_relative=True,
)
def gpg(outcomes: Outcomes) -> Tensor:
    """Subtract the group's mean reward and multiply by trajectories / nonzero rewards of the batch, [B]."""
    nonzero = int((outcomes.rewards != 0).sum())
    alpha = len(outcomes.rewards) / max(nonzero, 1)
    return alpha * (outcomes.rewards - group_mean(outcomes, outcomes.rewards))
