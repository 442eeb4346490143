"""What the events of a split's groups add up to, over the whole run and since the last chapter of its record; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.facts import AbandonedCompletion, BlobRef, Split
from penstock.protocol.record.lineage import AccountState, DroppedGroup, EvaluatedGroup, SplitTotals
from penstock.trainer.groups.drops import Drop, DropReason
from penstock.trainer.learner.step_plan import ReadyGroup


@dataclass(slots=True)
class NewEvents:
    """What happened since the last chapter."""

    issued: list[str] = field(default_factory=list)
    reopened: list[str] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    evaluated: list[tuple[str, int, BlobRef | None]] = field(default_factory=list)  # with tokens and pack


class GroupTotals:
    """The sums of one split; `GroupStates` checks that each group is counted once."""

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
        """Count a step: the groups that it was the first use of, and the sampled tokens of all by age in versions."""
        self._use({group.group_id: group.num_tokens for group in first})
        self._count_abandoned(one for group in first for one in group.scored.generated.abandoned)
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
        """Take back the drop of a dead-lettered group, which had no tokens."""
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
        for one in abandoned:
            self._add("abandoned", one.reason, 1, one.num_tokens)


@dataclass(frozen=True, slots=True)
class Entries:
    """What happened since the previous entries, and the resulting state."""

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
