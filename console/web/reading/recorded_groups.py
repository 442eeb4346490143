"""The groups of a run's record as the trajectory browser lists and filters them; pure.

A chapter is listed from its newest step to its oldest, then its evaluated, dropped and open groups. Chapters never change,
so the number of a chapter and a place in its list are a cursor that stays valid while the run goes on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from penstock.console.report.learning import mean
from penstock.protocol.errors import PenstockError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import LineageChapter

Status = Literal["trained", "evaluated", "dropped", "in_flight"]
MAX_REWARDS = 128  # values of one group that a list shows
_CURSOR = re.compile(r"(\d{1,9})\.(\d{1,9})")


class QueryRefused(PenstockError):
    """A request asks for what the console does not read; the text says what to ask instead."""


@dataclass(frozen=True, slots=True)
class Entry:
    group_id: str
    status: Status
    chapter: int
    split: str
    num_tokens: int
    pack: BlobRef | None = None
    reason: str = ""  # why it was dropped
    step: int | None = None
    epoch: int | None = None  # of the trainer session that made the step
    trained_version: int | None = None
    made_version: int | None = None
    use: int = 1
    scored: ScoredGroup | None = None

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards; () where the record has none."""
        return self.scored.rewards if self.scored else ()


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """What a list is limited to; None and "" are no limit."""

    step_from: int | None = None
    step_to: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    status: Status | None = None
    text: str = ""  # of the prompt or a completion, in any case of letters
    each_trajectory: bool = False  # rewards are limited one by one, else by their mean

    @property
    def has_reward(self) -> bool:
        return self.reward_min is not None or self.reward_max is not None

    def accepts(self, entry: Entry) -> bool:
        """Return True unless the record alone rules a group out; its texts are not known here."""
        if self.status is not None and entry.status != self.status:
            return False
        if not self._accepts_step(entry.step):
            return False
        if not self.has_reward:
            return True
        if self.each_trajectory:
            return any(map(self.accepts_reward, entry.rewards))
        return bool(entry.rewards) and self.accepts_reward(mean(entry.rewards))

    def _accepts_step(self, step: int | None) -> bool:
        if self.step_from is None and self.step_to is None:
            return True
        return step is not None and (self.step_from or 0) <= step and (self.step_to is None or step <= self.step_to)

    def accepts_reward(self, reward: float) -> bool:
        """Return True if one reward, or one mean, is within the limits."""
        return (self.reward_min is None or reward >= self.reward_min) and (
            self.reward_max is None or reward <= self.reward_max
        )

    def may_be_in(self, first_step: int | None, last_step: int | None) -> bool:
        """Return False if no group of a chapter with these steps can be accepted; None: it has no steps."""
        if self.step_from is None and self.step_to is None:
            return True
        if first_step is None or last_step is None:
            return False
        return last_step >= (self.step_from or 0) and (self.step_to is None or first_step <= self.step_to)


def entries(chapter: LineageChapter, *, is_last: bool = False) -> Iterator[Entry]:
    """Return the groups of a chapter in the order of the list; those in flight are listed for the last chapter only."""
    for step in reversed(chapter.steps):
        for group in step.groups:
            yield Entry(
                group_id=group.group_id, status="trained", chapter=chapter.number, split=group.scored.generated.split,
                num_tokens=group.num_tokens, pack=step.packs[group.pack] if group.pack < len(step.packs) else None,
                step=step.step, epoch=step.epoch, trained_version=step.trained_version, made_version=step.made_version, use=group.use,
                scored=group.scored,
            )  # fmt: skip
    packs = chapter.closed_packs
    for one in chapter.evaluated:
        pack = packs[one.pack] if one.pack is not None and one.pack < len(packs) else None
        yield Entry(one.group_id, "evaluated", chapter.number, "eval", one.num_tokens, pack)
    for gone in chapter.dropped:
        pack = packs[gone.pack] if gone.pack is not None and gone.pack < len(packs) else None
        yield Entry(gone.group_id, "dropped", chapter.number, gone.split, gone.num_tokens, pack, gone.reason)
    if is_last:
        for split, ids in sorted(chapter.account.in_flight.items()):
            for group_id in ids:
                yield Entry(group_id, "in_flight", chapter.number, split, 0)


def parse_cursor(cursor: str) -> tuple[int, int]:
    """Return the chapter and the place in its list; raises QueryRefused."""
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise QueryRefused(f"cursor {cursor[:40]!r} is none that a list returned; begin again without it")
    return int(found[1]), int(found[2])


def group_row(entry: Entry) -> dict[str, Any]:
    """Return a group as one line of a list, without its texts."""
    row: dict[str, Any] = {
        "group_id": entry.group_id,
        "status": entry.status,
        "reason": entry.reason,
        "split": entry.split,
        "step": entry.step,
        "chapter": entry.chapter,
        "trained_version": entry.trained_version,
        "made_version": entry.made_version,
        "tokens": entry.num_tokens,
        "use": entry.use,
        "prompt": None,
    }
    if entry.scored is None:
        return row
    generated, rewards = entry.scored.generated, entry.scored.rewards
    return row | {
        "rewards": list(rewards[:MAX_REWARDS]),
        "num_trajectories": len(rewards),
        "reward_mean": mean(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "is_degenerate": min(rewards) == max(rewards),
        "reward_name": generated.reward_name,
        "scorer": entry.scored.scorer,
        "issued_version": generated.issued_version,
        "oldest_version": generated.oldest_version,
        "newest_version": generated.newest_version,
        "staleness": None if entry.trained_version is None else entry.trained_version - generated.oldest_version,
        "finish_reasons": dict(Counter(generated.finish_reasons)),
    }


def trajectory_rows(entry: Entry, wanted: GroupFilter) -> list[dict[str, Any]]:
    """Return the trajectories of a group that a filter accepts, as lines of a list without texts."""
    if entry.scored is None:
        return []
    generated = entry.scored.generated
    return [
        {
            "group_id": entry.group_id,
            "index": index,
            "status": entry.status,
            "step": entry.step,
            "chapter": entry.chapter,
            "reward": reward,
            "parts": {name: values[index] for name, values in entry.scored.parts.items()},
            "tokens": generated.completion_tokens[index],
            "finish_reason": generated.finish_reasons[index],
            "is_baseline": generated.has_baseline and index == len(entry.scored.rewards) - 1,
            "prompt": None,
            "completion": None,
        }
        for index, reward in enumerate(entry.scored.rewards)
        if wanted.accepts_reward(reward)
    ]
