"""REINFORCE++, with and without a group's baseline: rewards whitened over all tokens of the batch."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator, group_mean, group_sizes
from penstock.trainer.algorithm.estimators.reinforce import reward_to_go
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import Sequences
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


def reinforce_pp_tokens(rewards: Tensor, sequences: Sequences, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [N] of REINFORCE++ with a reward per token [N], the KL inside."""
    returns = reward_to_go(rewards, sequences, gamma=gamma)
    return whiten(returns), returns
