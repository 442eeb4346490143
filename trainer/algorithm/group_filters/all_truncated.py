"""Groups of cut answers alone."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.group_filters.interface import GroupCandidate, Options, group_filter


class AllTruncatedOptions(Options):
    """Option of `all_truncated`."""

    drop_truncated_groups: bool = Field(
        default=False,
        description="Groups whose answers were all cut at rollout.max_new_tokens are replaced by other prompts before the step.",
    )


@group_filter(
    options=AllTruncatedOptions,
    source="arXiv 2503.14476, of whole groups",
    reason="all_truncated",
    switch="drop_truncated_groups",
    precedence=1,
)
def all_truncated(group: GroupCandidate, *, drop_truncated_groups: bool = True) -> bool:
    """Drop groups whose answers were all cut: `mask_truncated` would leave nothing of them."""
    num_trained = len(group.finish_reasons) - group.has_baseline
    return drop_truncated_groups and all(reason == "length" for reason in group.finish_reasons[:num_trained])
