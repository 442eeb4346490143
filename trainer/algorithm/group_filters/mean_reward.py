"""Groups of prompts that are too easy or too hard."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock.trainer.algorithm.group_filters.interface import GroupCandidate, Options, group_filter


class MeanRewardOptions(Options):
    """Option of `mean_reward`."""

    group_mean_range: tuple[float, float] | None = Field(
        default=None,
        description="Groups whose mean reward is not between these two numbers, or is one of them, are replaced by other prompts before the step.",
    )

    @field_validator("group_mean_range")
    @classmethod
    def _has_an_inside(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ValueError(f"{list(bounds)}: expected two numbers, the lower one first")
        return bounds


@group_filter(
    options=MeanRewardOptions, source="ROLL difficulty_mask, query_filter_config", reason="mean_out_of_range",
    switch="group_mean_range", precedence=2,
)  # fmt: skip
def mean_reward(group: GroupCandidate, *, group_mean_range: tuple[float, float] | None = (0.0, 1.0)) -> bool:
    """Drop groups whose mean reward is outside of a range, or at its ends: their prompts are too hard or too easy."""
    rewards = group.rewards[: len(group.rewards) - group.has_baseline]
    return group_mean_range is not None and not group_mean_range[0] < sum(rewards) / len(rewards) < group_mean_range[1]
