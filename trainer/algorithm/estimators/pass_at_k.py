"""Pass@k training: only the best of a group learns."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.interface import (
    STD_EPSILON,
    Outcomes,
    StdNormalisation,
    advantage_estimator,
    group_std,
    rewards_differ,
)
from penstock.trainer.algorithm.lazy_torch import Tensor, torch


@advantage_estimator(
    options=StdNormalisation,
    source="arXiv 2503.19595",
    presets={
        "pass_at_k": {
            "advantage": "pass_at_k",
            "normalise_by_std": True,
            "loss": "ppo_clip",
            "aggregation": "token-mean",
        }
    },
    group_relative=True,
)
def pass_at_k(outcomes: Outcomes, *, normalise_by_std: bool = True) -> Tensor:
    """Credit only the best of a group, by its lead on the second, [B].

    A group of one gets 0; of several equally good ones the first is the best and leads by 0.
    """
    advantages = torch.zeros_like(outcomes.rewards)
    std, differing = group_std(outcomes), rewards_differ(outcomes)
    for group in torch.unique(outcomes.groups):
        members = torch.nonzero(outcomes.groups == group).flatten()
        if len(members) < 2 or not differing[members[0]]:
            continue
        best = torch.topk(outcomes.rewards[members], 2)
        winner = members[best.indices[0]]
        lead = best.values[0] - best.values[1]
        advantages[winner] = lead / (std[winner] + STD_EPSILON) if normalise_by_std else lead
    return advantages
