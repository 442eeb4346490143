"""REINFORCE++, with and without a group's baseline: rewards whitened over all tokens of the batch."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator, group_mean, group_sizes
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.reward_shaping import whiten


@advantage_estimator(
    source="arXiv 2501.03262",
    presets={"reinforce_pp": {"advantage": "reinforce_pp", "loss": "ppo_clip", "aggregation": "token-mean"}},
)
def reinforce_pp(outcomes: Outcomes) -> Tensor:
    """Whiten one reward per trajectory over all tokens of the batch, [B]."""
    return whiten(outcomes.rewards, weights=outcomes.lengths)


@advantage_estimator(
    source="arXiv 2501.03262",
    presets={
        "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "loss": "ppo_clip", "aggregation": "token-mean"}
    },
)
def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """Subtract the group's mean reward, then whiten over all tokens of the batch, [B]."""
    centred = outcomes.rewards - torch.where(
        group_sizes(outcomes) > 1, group_mean(outcomes, outcomes.rewards), torch.zeros_like(outcomes.rewards)
    )
    return whiten(centred, weights=outcomes.lengths)
