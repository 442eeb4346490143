"""Issues tasks as soon as the staleness bound admits them, in a separate thread.

What is issued, and what becomes of it, is decided by `Dispatch` and recorded by `GroupStates`, both under `RunGroups.lock`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.trainer.connections import Connections
from penstock.trainer.groups.dispatch import Dispatch, RunGroups
from penstock.trainer.groups.group_states import GroupStates
from penstock.trainer.groups.group_totals import Drop, DropReason, Entries
from penstock.trainer.groups.issue_log import IssueLog
from penstock.trainer.groups.task_packs import TaskPack, TaskPublisher
from penstock.trainer.learner.step_plan import ReadyGroup

log = structlog.get_logger("trainer.groups.issue")


@dataclass(frozen=True, slots=True)
class IssuerState:
    dispatch: dict[str, Any]
    ledger: tuple[tuple[int, tuple[str, ...]], ...]  # trained groups by version, within the staleness window
    totals: dict[str, Any]
    unsent: tuple[tuple[str, ...], ...]  # packs that are issued but not known to be on the stream
    letters_read: int  # sequence number of the last dead letter that is included
    entries: Entries

    @classmethod
    def of(cls, groups: RunGroups, dispatch: dict[str, Any], unsent: Sequence[tuple[str, ...]] = ()) -> IssuerState:
        """Return the state of a run's groups, with the entries since the last chapter; to be called with `RunGroups.lock` held."""
        train = groups.train
        counts, entries = train.totals.counts_document(), groups.take_entries()
        return cls(dispatch, train.rows(), counts, tuple(unsent), train.letters_read, entries)

    def is_in(self, state: CheckpointState) -> bool:
        """Return True if a checkpoint holds exactly this state.

        It can change without an entry: a refused message changes the totals, and perhaps the refused attempts.
        """
        return self.entries.is_empty and (
            (self.dispatch, self.ledger, self.totals, self.unsent, self.letters_read, self.entries.account)
            == (state.dispatch, state.ledger, state.totals, state.unsent, state.letters_read, state.account)
        )


def outcomes(groups: GroupStates) -> dict[str, Any]:
    totals = groups.totals
    return {
        "issued": totals.sums.issued,
        "issued_again": 0,
        "given_up": 0,
        "outstanding": groups.num_outstanding,
        "scored": totals.num_scored,
        "trained": totals.sums.used,
        "reused": totals.num_reused,
        "dropped": {str(reason): count for reason, count in totals.dropped_groups.items()},
        "abandoned_completions": dict(totals.sums.abandoned),
        "abandoned_tokens": dict(totals.sums.abandoned_tokens),
    }


class Issuer:
    def __init__(
        self, connections: Connections, dispatch: Dispatch, groups: RunGroups, unsent: Sequence[tuple[str, ...]] = ()
    ) -> None:
        self._dispatch, self._groups = dispatch, groups
        self._unsent = list(unsent)
        self._resends = bool(unsent)
        self._log: IssueLog | None = None
        self._paused = False
        self._draining = False
        self._tasks, self._traced = TaskPublisher(connections, "train"), connections.traced
        self._version = PolicyVersion(0)  # the newest that workers can fetch
        self._trainer_version = PolicyVersion(0)  # the version that the next step starts from
        self._most_outstanding = 0
        self._changed = threading.Condition(groups.lock)
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._guard, name="issuer", daemon=True)

    def __enter__(self) -> Issuer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(30.0)
        if self._log is not None and not self._thread.is_alive():
            self._log.close()

    def keep_log(self, log: IssueLog) -> None:
        self._log = log
        self._dispatch.cursor.before = log.before

    def pause(self, is_paused: bool) -> None:
        with self._changed:
            self._paused = is_paused
            self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            self._draining = True

    def stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def groups_per_message(self) -> int:
        return self._dispatch.groups_per_message

    def outstanding(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._dispatch.cursor.outstanding())

    def accept(self, group_id: str, *, is_preferred: bool = False) -> DropReason | None:
        with self._changed:
            was_dead = self._groups.train.is_dead(group_id)
            refusal = self._dispatch.accept(group_id, is_preferred=is_preferred)
            if was_dead and refusal is None:
                log.info("dead-lettered group arrived after all: outstanding again", group_id=group_id)
            return refusal

    def promise(self, group_id: str) -> TaskPromise:
        with self._changed:
            return self._dispatch.promise(group_id)

    def mark_trained(
        self,
        batch: Sequence[ReadyGroup],
        staleness_tokens: Mapping[int, int],
        *,
        version: PolicyVersion,
        made: PolicyVersion,
    ) -> dict[str, int]:
        """Record the step from ``version`` to ``made``; return how often each group was trained, by id.

        The message of a group that is kept for another use stays unacknowledged until the group is retired: a trainer that
        resumes receives it again.
        """
        with self._changed:
            uses = self._dispatch.train(version, batch, staleness_tokens)
            self._trainer_version = made
            # A drop may wake the issuer before the next version is announced: the groups wanted must exclude this step.
            self._most_outstanding = max(0, self._most_outstanding - len(batch))
            return uses

    def drop(self, drop: Drop) -> None:
        with self._changed:
            self._traced.ended(drop.group_id, "dropped", reason=str(drop.reason))
            if not self._dispatch.drop(drop):
                log.warning(
                    "group dropped at its last attempt: its prompt is skipped",
                    group_id=drop.group_id,
                    reason=drop.reason,
                )
            self._changed.notify_all()

    def advance(self, version: PolicyVersion, groups_wanted: int) -> None:
        with self._changed:
            self._version = version
            if is_newer(version, self._trainer_version):  # the first call of a session
                self._trainer_version = version
            self._most_outstanding = groups_wanted
            self._changed.notify_all()

    def check(self) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def next_packs(self) -> list[TaskPack]:
        """Issue what can be issued now; return the packs to publish. Call `mark_sent` when all are on the stream."""
        with self._changed:
            if self._resends:
                if self._most_outstanding == 0:  # no version is announced yet
                    return []
                self._resends = False
                return [self._dispatch.pack_again(ids, self._version) for ids in self._unsent]
            if self._paused or self._draining:
                return []
            packs = self._dispatch.next_packs(
                self._version, self._most_outstanding, trainer_version=self._trainer_version
            )
            self._unsent = [tuple(task.group_id for task in pack.tasks) for pack in packs]
            return packs

    def log_issue(self, packs: Sequence[TaskPack]) -> None:
        """Record packs of `next_packs`, before they are published; raises CheckpointError."""
        if self._log is not None:
            with self._changed:
                position = self._dispatch.cursor.position
            self._log.append(position, [task.group_id for pack in packs for task in pack.tasks])

    def mark_sent(self) -> None:
        with self._changed:
            self._unsent.clear()

    def take_state(self) -> IssuerState:
        with self._changed:
            return IssuerState.of(self._groups, self._dispatch.cursor.to_document(), self._unsent)

    def totals(self) -> dict[str, Any]:
        with self._changed:
            return self._groups.train.totals.counts_document()

    def groups(self) -> dict[str, Any]:
        with self._changed:
            return {
                **outcomes(self._groups.train),
                "issued_again": self._dispatch.cursor.num_issued_again,
                "given_up": self._dispatch.cursor.num_given_up,
            }

    def _guard(self) -> None:
        try:
            self._work()
        except Exception as err:  # noqa: BLE001  the training thread raises it
            with self._changed:
                self._failure = err

    def _work(self) -> None:
        while True:
            with self._changed:
                packs = [] if self._closing else self.next_packs()
                if not packs:
                    if self._closing:
                        return
                    self._changed.wait()
                    continue
            self.log_issue(packs)
            for pending in [self._tasks.publish(pack) for pack in packs]:
                pending.wait()
            self.mark_sent()
