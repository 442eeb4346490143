"""Dynamic sampling: groups without a signal."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from penstock.trainer.algorithm.group_filters.interface import GroupCandidate, Options, group_filter


class EqualRewardsOptions(Options):
    """Option of `equal_rewards`."""

    dynamic_sampling: bool = Field(
        default=False, description="Groups whose rewards are all equal are replaced by other prompts before the step."
    )


@group_filter(
    options=EqualRewardsOptions, source="arXiv 2503.14476", reason="no_signal", switch="dynamic_sampling", precedence=0
)
def equal_rewards(group: GroupCandidate, *, dynamic_sampling: bool = True) -> bool:
    """Drop groups whose rewards are all equal (DAPO's dynamic sampling)."""
    return dynamic_sampling and not rewards_differ(group.rewards)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True if at least two rewards differ, by more than the rounding of their sum."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9 * max(abs(r) for r in rewards)
