"""Groups whose rewards are nearly equal."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.group_filters.interface import GroupCandidate, Options, group_filter


class RewardSpreadOptions(Options):
    """Option of `reward_spread`."""

    min_reward_spread: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False,
        description="Groups whose highest and lowest reward differ by less are replaced by other prompts before the step.",
    )  # fmt: skip


@group_filter(
    options=RewardSpreadOptions, source="AgentRL, its groups of less than 0.1", reason="small_spread",
    switch="min_reward_spread", precedence=3,
)  # fmt: skip
def reward_spread(group: GroupCandidate, *, min_reward_spread: float = 0.1) -> bool:
    """Drop groups whose rewards are so close that their differences are mostly noise."""
    rewards = group.rewards[: len(group.rewards) - group.has_baseline]
    return max(rewards) - min(rewards) < min_reward_spread
