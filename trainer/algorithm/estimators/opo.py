"""OPO: the group's mean reward, weighted by length, as baseline."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor


@advantage_estimator(
    source="arXiv 2505.23585",
    presets={"opo": {"advantage": "opo", "loss": "ppo_clip", "aggregation": "token-mean"}},
    group_relative=True,
)
def opo(outcomes: Outcomes) -> Tensor:
    """Subtract the group's mean reward weighted by length, [B]; a group of one gets 0 (verl: its reward)."""
    index, count = outcomes.group_index
    lengths = outcomes.lengths.to(outcomes.rewards.dtype)
    weighted = lengths.new_zeros(count).index_add(0, index, lengths * outcomes.rewards)
    total = lengths.new_zeros(count).index_add(0, index, lengths)
    return outcomes.rewards - (weighted / total.clamp(min=1.0))[index].where(total[index] > 0, outcomes.rewards)
