"""What the events of a split's groups add up to, over the whole run and since the last chapter of its record; pure.

A group that is not trained on has one reason, and is counted in groups and tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.protocol.groups import AbandonedCompletion, BlobRef, ScoredGroup, Split
from penstock.protocol.record.lineage import AccountState, DroppedGroup, EvaluatedGroup, SplitTotals
from penstock.trainer.learner.step_plan import ReadyGroup

MAX_CLAIMED_TOKENS = 2**32  # 4096 trajectories of 1,000,000 tokens: no group is larger


class DropReason(StrEnum):
    """Why a group is discarded; the values are what metrics and reports show."""

    STALE = "stale"  # older than rollout.max_staleness at the moment of use
    DUPLICATE = "duplicate"  # it has arrived already, was trained, or this attempt was given up
    FOREIGN = "foreign"  # not a group that this run has issued
    FUTURE = "future"  # sampled by a version that is not reached, or whose place in a rolled-back session is not known
    UNREADABLE = "unreadable"  # its object is missing, corrupt or not what the message says
    QUARANTINED = "quarantined"  # two readers were killed while they processed its message
    DEAD = "dead"  # it went to the dead letters of another service
    NO_SIGNAL = "no_signal"  # all its rewards are equal (group filter `equal_rewards`, algorithm.dynamic_sampling)
    NO_BASELINE = "no_baseline"  # issued under another algorithm: it has no greedy completion, and remax needs one
    LOST = "lost"  # every queue is empty and it never arrived
    SUPERSEDED = "superseded"  # an earlier session had dropped it, and its next attempt has arrived
    ABANDONED = "abandoned"  # held-out: its evaluation failed, or ended with the trainer that started it


_CURES: dict[str, str] = {
    DropReason.NO_SIGNAL: "all rewards of each were equal, and algorithm.dynamic_sampling waits for others: check the reward with "
    "`penstock reward test`, use easier or harder prompts, raise rollout.group_size or rollout.temperature, or set "
    "algorithm.dynamic_sampling = false",
    "all_truncated": "all answers of each were cut, and algorithm.drop_truncated_groups waits for others: raise rollout.max_new_tokens, or set "
    "algorithm.drop_truncated_groups = false",
    "mean_out_of_range": "their mean reward is outside of algorithm.group_mean_range: use easier or harder prompts, or widen it",
    "small_spread": "their rewards differ by less than algorithm.min_reward_spread: raise rollout.group_size or rollout.temperature, or lower it",
    DropReason.STALE: "older than rollout.max_staleness: raise it, or lower rollout.groups_per_step",
    DropReason.UNREADABLE: "their objects are missing or corrupt: check the object store with `penstock audit`",
    DropReason.LOST: "they were in no queue any more: look for workers and reward services that were stopped",
    DropReason.NO_BASELINE: "issued under another algorithm, and remax needs a greedy completion: they are sampled again",
}


def describe_drops(counts: Mapping[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda one: -one[1])
    return "; ".join(
        f"{count} {reason}" + (f" ({_CURES[reason]})" if reason in _CURES else "")
        for reason, count in most_first
        if count
    )


@dataclass(frozen=True, slots=True)
class Drop:
    group_id: str
    reason: str  # a `DropReason`, or that of a group filter
    num_tokens: int
    pack: BlobRef | None = None
    abandoned: tuple[AbandonedCompletion, ...] = ()  # completions of it that were started and not kept
    is_final: bool = False  # its prompt is not issued again


def claimed_tokens(scored: ScoredGroup) -> int:
    """Return the number of sampled tokens that a message states, before its pack is read; at most `MAX_CLAIMED_TOKENS`.

    Anybody who may write to the queue chooses it, and the totals in a checkpoint must stay within the range of a count.
    """
    return min(sum(scored.generated.completion_tokens), MAX_CLAIMED_TOKENS)


@dataclass(slots=True)
class NewEvents:
    issued: list[str] = field(default_factory=list)
    reopened: list[str] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    evaluated: list[tuple[str, int, BlobRef | None]] = field(default_factory=list)  # with tokens and pack


class GroupTotals:
    def __init__(self, sums: SplitTotals | None = None, counts: Mapping[str, Any] | None = None) -> None:
        counts = counts or {}
        self.sums = sums or SplitTotals()  # but ``in_flight``, which `GroupStates` knows
        self.new = NewEvents()
        self.num_scored = int(counts.get("groups_scored", 0))  # arrived for the first time
        self.num_reused = int(counts.get("groups_reused", 0))  # further uses of trained groups
        ages: Mapping[str, int] = counts.get("staleness_tokens", {})
        self.staleness_tokens: Counter[int] = Counter({int(age): count for age, count in ages.items()})

    def issue(self, group_ids: Sequence[str]) -> None:
        self.new.issued += group_ids
        self.sums = self.sums.model_copy(update={"issued": self.sums.issued + len(group_ids)})

    def train(self, first: Sequence[ReadyGroup], staleness_tokens: Mapping[int, int], *, num_reused: int) -> None:
        self._use({group.group_id: group.num_tokens for group in first})
        self._count_abandoned(completion for group in first for completion in group.scored.generated.abandoned)
        self.num_reused += num_reused
        self.staleness_tokens.update(staleness_tokens)

    def evaluate(self, tokens: Mapping[str, int], packs: Mapping[str, BlobRef]) -> None:
        self.new.evaluated += [(group_id, count, packs.get(group_id)) for group_id, count in tokens.items()]
        self._use(tokens)

    def drop(self, drop: Drop) -> None:
        self.new.dropped.append(drop)
        self._add("dropped", drop.reason, 1, drop.num_tokens)
        self._count_abandoned(drop.abandoned)

    def revive(self, group_id: str) -> None:
        unwritten = [drop for drop in self.new.dropped if drop.group_id == group_id]
        if unwritten:
            self.new.dropped.remove(unwritten[-1])
        else:
            self.new.reopened.append(group_id)
        self._add("dropped", DropReason.DEAD, -1, 0)

    def refuse(self, drop: Drop) -> None:
        """Count a delivery that is not used: its group has arrived already, is closed, or was never issued."""
        self._add("refused", drop.reason, 1, drop.num_tokens)

    @property
    def dropped_groups(self) -> Counter[str]:
        return _merged(self.sums.dropped, self.sums.refused)

    @property
    def dropped_tokens(self) -> Counter[str]:
        return _merged(self.sums.dropped_tokens, self.sums.refused_tokens)

    def counts_document(self) -> dict[str, Any]:
        return {
            "groups_trained": self.sums.used,
            "groups_reused": self.num_reused,
            "tokens_trained": self.staleness_tokens.total(),  # of every use of a group
            "groups_scored": self.num_scored,
            "dropped_groups": dict(self.dropped_groups),
            "dropped_tokens": dict(self.dropped_tokens),
            "abandoned_completions": dict(self.sums.abandoned),
            "abandoned_tokens": dict(self.sums.abandoned_tokens),
            "staleness_tokens": {str(age): count for age, count in sorted(self.staleness_tokens.items())},
        }

    def take_new(self) -> NewEvents:
        new, self.new = self.new, NewEvents()
        return new

    def _use(self, tokens: Mapping[str, int]) -> None:
        used, used_tokens = self.sums.used + len(tokens), self.sums.used_tokens + sum(tokens.values())
        self.sums = self.sums.model_copy(update={"used": used, "used_tokens": used_tokens})

    def _add(self, outcome: str, reason: str, groups: int, tokens: int) -> None:
        changed: dict[str, dict[str, int]] = {}
        for name, count in ((outcome, groups), (f"{outcome}_tokens", tokens)):
            of: Mapping[str, int] = getattr(self.sums, name)
            changed[name] = {**of, str(reason): of.get(reason, 0) + count}
        self.sums = self.sums.model_copy(update=changed)

    def _count_abandoned(self, abandoned: Iterable[AbandonedCompletion]) -> None:
        for completion in abandoned:
            self._add("abandoned", completion.reason, 1, completion.num_tokens)


@dataclass(frozen=True, slots=True)
class Entries:
    issued: dict[Split, tuple[str, ...]]
    reopened: tuple[str, ...]  # stored in the chapter as ``revived``
    dropped: tuple[DroppedGroup, ...]
    evaluated: tuple[EvaluatedGroup, ...]
    closed_packs: tuple[BlobRef, ...]  # of the dropped and evaluated groups, which hold their numbers
    account: AccountState

    @classmethod
    def of(cls, new: Mapping[Split, NewEvents], account: AccountState) -> Entries:
        numbers: dict[BlobRef, int] = {}

        def number(pack: BlobRef | None) -> int | None:
            return None if pack is None else numbers.setdefault(pack, len(numbers))

        dropped = tuple(
            DroppedGroup(
                group_id=drop.group_id,
                split=split,
                reason=str(drop.reason),
                num_tokens=drop.num_tokens,
                pack=number(drop.pack),
                abandoned=drop.abandoned,
            )
            for split, events in new.items()
            for drop in events.dropped
        )
        evaluated = tuple(
            EvaluatedGroup(group_id=group_id, num_tokens=num_tokens, pack=number(pack))
            for events in new.values()
            for group_id, num_tokens, pack in events.evaluated
        )
        issued: dict[Split, tuple[str, ...]] = {s: tuple(events.issued) for s, events in new.items() if events.issued}
        reopened = tuple(group_id for events in new.values() for group_id in events.reopened)
        return cls(issued, reopened, dropped, evaluated, tuple(numbers), account)

    @property
    def is_empty(self) -> bool:
        return not (self.issued or self.reopened or self.dropped or self.evaluated)


def _merged(dropped: Mapping[str, int], refused: Mapping[str, int]) -> Counter[str]:
    total = Counter(dropped)
    total.update(refused)  # unlike ``+``, keeps a reason whose count is 0 again
    return total
