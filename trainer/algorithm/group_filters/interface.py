"""What a file that holds a group filter needs: `group_filter`, `GroupCandidate`, `Options`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.trainer.algorithm.parts import Options, OptionsT_co, Part, decorator

if TYPE_CHECKING:
    from penstock.protocol.trajectory import Group

__all__ = [
    "GroupCandidate", "GroupFilter", "GroupFilterFunction", "GroupRule", "Options", "drop_reason", "group_filter",
]  # fmt: skip

_REASON = re.compile(r"[a-z][a-z0-9_]{0,62}")
RESERVED_REASONS = frozenset(
    {
        "stale", "duplicate", "foreign", "future", "unreadable", "quarantined", "dead", "no_baseline", "lost", "superseded",
        "abandoned",
    }
)  # fmt: skip  # reasons that the trainer itself uses
GroupFilterFunction = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """A group as a filter sees it. Rewards, lengths and finish reasons are of each completion, or episode, in order."""

    rewards: tuple[float, ...]  # as scored; of a greedy baseline the last
    lengths: tuple[int, ...]  # sampled tokens
    finish_reasons: tuple[str, ...]  # "stop", "length", …
    has_baseline: bool  # the last completion is greedy and not trained on
    oldest_version: int  # policy versions that sampled its tokens
    newest_version: int
    prompt_text: str  # empty with data.from_run, where groups are chosen before their packs are read
    row: RewardRequest | None  # data_source, ground_truth and extra_info of its row; None with data.from_run


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupFilter(Part[OptionsT_co]):
    """A group filter: ``fn(group, **options)`` returns True for a group to drop; another prompt takes its place."""

    reason: str  # under which it is counted; of a built-in filter a stored name
    switch: str = ""  # option that turns it on when it is not at its default; empty: algorithm.group_filters names it
    precedence: int = 100  # of several filters that drop a group, the lowest is counted

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _REASON.fullmatch(self.reason) or self.reason in RESERVED_REASONS:
            raise TypeError(
                f"group filter {self.name}: reason {self.reason!r}: expected lower-case letters, digits and underscores, and "
                f"none of the trainer's own ({', '.join(sorted(RESERVED_REASONS))}); choose another"
            )


group_filter = decorator(GroupFilter)
"""Make a function a group filter of the function's name; the arguments are the fields of `GroupFilter`."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    name: str  # as the run file writes it
    reason: str
    drops: GroupFilterFunction


def drop_reason(scored: ScoredGroup, group: Group | None, rules: Sequence[GroupRule]) -> str | None:
    """Return the reason of the first rule that drops a group, None if it stays; raises ConfigError for a rule that fails."""
    if not rules:
        return None
    summary = scored.generated
    candidate = GroupCandidate(
        rewards=tuple(scored.rewards),
        lengths=tuple(summary.completion_tokens),
        finish_reasons=tuple(summary.finish_reasons),
        has_baseline=summary.has_baseline,
        oldest_version=summary.oldest_version,
        newest_version=summary.newest_version,
        prompt_text="" if group is None else group.prompt_text,
        row=None if group is None else group.reward,
    )
    for rule in rules:
        try:
            if rule.drops(candidate):
                return rule.reason
        except Exception as err:
            raise ConfigError(
                f"group filter {rule.name} failed for group {scored.generated.group_id}: {type(err).__name__}: {err}; fix its "
                "file, or leave it out of algorithm.group_filters"
            ) from err
    return None
