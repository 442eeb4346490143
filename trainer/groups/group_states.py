"""Where every group of a split is, from its issue until it is closed, and what that adds up to; pure.

                                                              ┌───take────┐
    issue ─▶ ISSUED ─arrive─▶ ARRIVED ─offer─▶ READY ─take─▶ IN_USE ─train─▶ KEPT ─retire─▶ CLOSED
               ▲  └─────drop─────┴──────drop─────┴──────────────┴──train─────────────────────▶│
               └────────────────revive: its dead letter was sent again ───────────────────────┘

A group is in one state; an event that its state does not allow raises `GroupStateError` and changes nothing. Closed
groups are forgotten, but for those that may be delivered again: trained ones within the staleness window, since an
older one is refused as stale, and the newest that a dead letter closed. Of the split ``eval`` a group is issued, then
evaluated or dropped. In either split issued = used + dropped (by reason) + outstanding, which an audit checks id by id.

Not thread-safe: who holds `RunGroups.lock` may call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.protocol.groups import BlobRef
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.versions import PolicyVersion, VersionTree, last_chance_version
from penstock.trainer.errors import GroupStateError
from penstock.trainer.groups.group_totals import Drop, DropReason, GroupTotals
from penstock.trainer.learner.step_plan import ReadyGroup

MAX_DEAD_KNOWN = 10_000  # newest dead-lettered groups that are recognised when their letters are sent again


class State(StrEnum):
    ISSUED = "issued"  # its task is in a queue or in work, or about to be published
    ARRIVED = "arrived"  # its message is received and its pack is being read
    READY = "ready"  # it may be taken
    IN_USE = "in use"  # in the batch that is trained
    KEPT = "kept"  # trained, and may be trained again
    CLOSED = "closed"  # trained for the last time, or dropped


_ALLOWED: Mapping[str, frozenset[State]] = {
    "issue": frozenset(),
    "arrive": frozenset({State.ISSUED, State.KEPT}),
    "offer": frozenset({State.ARRIVED}),
    "take": frozenset({State.READY, State.KEPT}),
    "train": frozenset({State.IN_USE}),
    "retire": frozenset({State.ARRIVED, State.KEPT}),
    "drop": frozenset({State.ISSUED, State.ARRIVED, State.READY}),
    "revive": frozenset({State.CLOSED}),
    "evaluate": frozenset({State.ISSUED}),
}
_OPEN = (State.ISSUED, State.ARRIVED, State.READY, State.IN_USE)


@dataclass(slots=True)
class GroupRecord:
    state: State
    issued_for: PolicyVersion | None = None  # version of its task; None: an earlier session issued it
    promise: TaskPromise | None = None  # what its task asked for; None: an earlier session issued it
    message: int | None = None  # sequence number of the message that brought it
    content: ReadyGroup | None = None  # while it is ready, in use or kept; not where it is still to come again
    uses: tuple[PolicyVersion, ...] = ()  # versions at which it was trained
    is_dead: bool = False  # closed by a dead letter, which may be sent again


_UNKNOWN = GroupRecord(State.CLOSED)


class GroupStates:
    def __init__(
        self,
        *,
        max_staleness: int = 0,
        max_trained_count: int = 1,
        totals: GroupTotals | None = None,
        outstanding: Iterable[str] = (),
        dead: Iterable[str] = (),
        ledger: Iterable[tuple[int, Sequence[str]]] = (),
    ) -> None:
        """Start empty, or from the parts of a checkpoint: ``outstanding`` and ``dead`` ids, ``ledger`` of `rows`.

        Trained groups with uses left are kept: their messages were not acknowledged, and are delivered again.
        """
        self._max_staleness, self._max_trained_count = max_staleness, max_trained_count
        self._groups: dict[str, GroupRecord] = {}
        self._by_state: dict[State, dict[str, GroupRecord]] = {state: {} for state in State}  # index, in order of entry
        self._under_way: Counter[PolicyVersion] = Counter()  # index: groups of this session not read yet, by issued_for
        self._messages: dict[int, None] = {}  # received and not acknowledged
        self._trained_at: PolicyVersion | None = None  # version of the newest step
        self._is_ended = False  # no group is trained again
        self.letters_read = 0  # sequence number of the last dead letter that these states include
        self.versions = VersionTree()
        self.totals = totals or GroupTotals()
        for group_id in outstanding:
            self._add(group_id, GroupRecord(State.ISSUED))
        for group_id in dead:
            self._add(group_id, GroupRecord(State.CLOSED, is_dead=True))
        for version, ids in ledger:
            self._restore_uses(PolicyVersion(version), ids)

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def issue(self, group_ids: Iterable[str]) -> None:
        ids = list(group_ids)
        for group_id in ids:
            if group_id in self._groups:
                self._allowed(group_id, "issue")
            self._add(group_id, GroupRecord(State.ISSUED))
        self.totals.issue(ids)

    def set_task(self, group_id: str, version: PolicyVersion, promise: TaskPromise) -> None:
        if (record := self._groups.get(group_id)) is not None:
            self._count_under_way(record, -1)
            record.issued_for, record.promise = version, promise
            self._count_under_way(record, 1)

    def receive(self, message: int) -> None:
        self._messages[message] = None

    def arrive(self, group_id: str, message: int) -> None:
        if (record := self._allowed(group_id, "arrive")).content is not None:
            raise _refused(group_id, "kept", "arrive")
        self.totals.num_scored += not record.uses
        record.message = message
        self._move(group_id, record, State.ARRIVED)

    def offer(self, group: ReadyGroup) -> None:
        record = self._allowed(group.group_id, "offer")
        record.content = group
        if record.uses and self._is_ended:
            self._close(group.group_id, record)
        else:
            self._move(group.group_id, record, State.KEPT if record.uses else State.READY)

    def take(self, group_ids: Iterable[str]) -> None:
        records = [(group_id, self._allowed(group_id, "take")) for group_id in group_ids]
        for group_id, record in records:
            if record.content is None:
                raise _refused(group_id, "kept and not delivered again", "take")
        for group_id, record in records:
            self._move(group_id, record, State.IN_USE)

    def train(
        self, version: PolicyVersion, batch: Sequence[ReadyGroup], staleness_tokens: Mapping[int, int]
    ) -> dict[str, int]:
        """Record the step made at ``version`` on all groups in use; return how often each was trained, by id."""
        records = [(group, self._allowed(group.group_id, "train")) for group in batch]
        first = [group for group, record in records if not record.uses]
        for group, record in records:
            record.uses, record.promise = (*record.uses, version), None
            if len(record.uses) < self._max_trained_count:
                self._move(group.group_id, record, State.KEPT)
            else:
                self._close(group.group_id, record)
        self.totals.train(first, staleness_tokens, num_reused=len(batch) - len(first))
        self._trained_at = version
        kept = ((i, record) for i, record in self._by_state[State.KEPT].items() if record.content is None)
        for group_id, record in [*self._by_state[State.CLOSED].items(), *kept]:  # the latter never came back
            if record.uses and self.versions.age(version, record.uses[-1]) > self._max_staleness:
                self._remove(group_id, record)
        return {group.group_id: len(record.uses) for group, record in records}

    def retire(self, group_id: str) -> None:
        record = self._allowed(group_id, "retire")
        if not record.uses:
            raise _refused(group_id, f"{record.state} and was never trained", "retire")
        self._close(group_id, record)

    def end(self) -> None:
        """Retire all kept groups, since no further batch is taken; those being read are retired when offered."""
        self._is_ended = True
        for group_id in list(self._by_state[State.KEPT]):
            self.retire(group_id)

    def drop(self, drop: Drop) -> None:
        """Close a group that is not used; one dropped as ``dead`` is remembered while its letter may be sent again."""
        record = self._allowed(drop.group_id, "drop")
        if record.uses:
            raise _refused(drop.group_id, f"{record.state} and was trained", "drop")
        if drop.reason == DropReason.DEAD:
            record.is_dead = True
            self._close(drop.group_id, record)
            if self.num(State.CLOSED) > MAX_DEAD_KNOWN:
                for group_id in self.dead()[:-MAX_DEAD_KNOWN]:
                    self._remove(group_id, self._groups[group_id])
        else:
            self._remove(drop.group_id, record)
        self.totals.drop(drop)

    def revive(self, group_id: str) -> None:
        """Issue a group again that a dead letter closed: the letter was sent again, or was not true."""
        record = self._allowed(group_id, "revive")
        if not record.is_dead:
            raise _refused(group_id, "closed, not by a dead letter", "revive")
        record.is_dead = False
        self._move(group_id, record, State.ISSUED)
        self.totals.revive(group_id)

    def evaluate(self, tokens: Mapping[str, int], packs: Mapping[str, BlobRef]) -> None:
        records = [(group_id, self._allowed(group_id, "evaluate")) for group_id in tokens]
        for group_id, record in records:
            self._remove(group_id, record)
        self.totals.evaluate(tokens, packs)

    def forget_messages(self, messages: Iterable[int]) -> None:
        for message in messages:
            self._messages.pop(message, None)

    # ── queries ───────────────────────────────────────────────────────────────────────────────

    def state(self, group_id: str) -> State | None:
        """Return the state of a group; None for one that is forgotten or was never issued."""
        record = self._groups.get(group_id)
        return record.state if record is not None else None

    def promise(self, group_id: str) -> TaskPromise | None:
        """Return what the task of a group asked for; None if this session did not issue it."""
        return self._groups.get(group_id, _UNKNOWN).promise

    def uses(self, group_id: str) -> tuple[PolicyVersion, ...]:
        return self._groups.get(group_id, _UNKNOWN).uses

    def has_arrived(self, group_id: str) -> bool:
        record = self._groups.get(group_id, _UNKNOWN)
        return record.content is not None or record.state is State.ARRIVED

    def content(self, group_id: str) -> ReadyGroup | None:
        return self._groups.get(group_id, _UNKNOWN).content

    def is_returning(self, group_id: str) -> bool:
        return self.state(group_id) is State.KEPT and not self.has_arrived(group_id)

    def is_dead(self, group_id: str) -> bool:
        return self._groups.get(group_id, _UNKNOWN).is_dead

    def outstanding(self) -> Iterator[str]:
        return (i for state in _OPEN for i, record in self._by_state[state].items() if not record.uses)

    @property
    def num_outstanding(self) -> int:
        return sum(1 for _ in self.outstanding())

    def missing(self) -> list[str]:
        return list(self._by_state[State.ISSUED])

    def num(self, state: State) -> int:
        return len(self._by_state[state])

    @property
    def num_kept_here(self) -> int:
        """Number of kept groups whose content is here; those of an earlier session are still to be delivered again."""
        return sum(record.content is not None for record in self._by_state[State.KEPT].values())

    def held(self, state: State) -> list[ReadyGroup]:
        return [record.content for record in self._by_state[state].values() if record.content is not None]

    def is_late(self, trainer_version: PolicyVersion) -> bool:
        """Return True if a group under way may be too old for every step after the one at ``trainer_version``.

        A worker may have sampled such a group with the version it was issued for. Under way is what is outstanding and
        not read yet. Groups that an earlier session issued are not considered, since the version they were issued for
        is not stored.
        """
        return self._under_way[last_chance_version(trainer_version, self._max_staleness)] > 0

    def dead(self) -> list[str]:
        return [group_id for group_id, record in self._by_state[State.CLOSED].items() if record.is_dead]

    def settled(self) -> list[int]:
        held = (State.ARRIVED, State.READY, State.IN_USE, State.KEPT)
        unsettled = {record.message for state in held for record in self._by_state[state].values()}
        return [message for message in self._messages if message not in unsettled]

    def rows(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        rows: dict[PolicyVersion, list[str]] = {}
        for group_id, record in sorted(self._groups.items()):
            for version in record.uses:
                if self._trained_at is not None and self.versions.age(self._trained_at, version) <= self._max_staleness:
                    rows.setdefault(version, []).append(group_id)
        return tuple((version, tuple(ids)) for version, ids in sorted(rows.items()))

    # ── records ───────────────────────────────────────────────────────────────────────────────

    def _allowed(self, group_id: str, event: str) -> GroupRecord:
        record = self._groups.get(group_id)
        if record is None or record.state not in _ALLOWED[event]:
            raise _refused(group_id, record.state if record is not None else "not outstanding", event)
        return record

    def _add(self, group_id: str, record: GroupRecord) -> None:
        self._groups[group_id] = self._by_state[record.state][group_id] = record

    def _move(self, group_id: str, record: GroupRecord, state: State) -> None:
        self._count_under_way(record, -1)
        del self._by_state[record.state][group_id]
        record.state = state
        self._by_state[state][group_id] = record
        self._count_under_way(record, 1)

    def _close(self, group_id: str, record: GroupRecord) -> None:
        record.content = None
        self._move(group_id, record, State.CLOSED)

    def _remove(self, group_id: str, record: GroupRecord) -> None:
        self._count_under_way(record, -1)
        del self._by_state[record.state][group_id], self._groups[group_id]

    def _restore_uses(self, version: PolicyVersion, ids: Sequence[str]) -> None:
        self._trained_at = version if self._trained_at is None else max(self._trained_at, version)
        for group_id in ids:
            if group_id not in self._groups:
                self._add(group_id, GroupRecord(State.KEPT))
            record = self._groups[group_id]
            record.uses = (*record.uses, version)
            if len(record.uses) >= self._max_trained_count and record.state is State.KEPT:
                self._close(group_id, record)

    def _count_under_way(self, record: GroupRecord, change: int) -> None:
        if record.issued_for is not None and record.state in (State.ISSUED, State.ARRIVED):
            self._under_way[record.issued_for] += change
            if not self._under_way[record.issued_for]:
                del self._under_way[record.issued_for]


def _refused(group_id: str, state: str, event: str) -> GroupStateError:
    return GroupStateError(
        f"internal error, please report: group {group_id} is {state}, and {event} is not allowed there; the trainer "
        "resumes from its newest checkpoint"
    )
