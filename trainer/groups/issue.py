"""Issues tasks as soon as the staleness bound admits them, in a thread of its own.

Every change of an issued group is made here, under one lock: it arrives, is trained, or is dropped (and perhaps issued
again), which admits the next ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocol import blob_keys, subjects
from penstock.protocol.facts import AbandonedCompletion
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.trace_context import new_trace
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.pending import Pending
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.trainer.connections import Connections
from penstock.trainer.groups.accounting import Accounting, Entries
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.drops import Drop, DropReason
from penstock.trainer.groups.image_uploads import ImageUploads
from penstock.trainer.groups.issue_log import IssueLog
from penstock.trainer.groups.task_packs import TaskPack

log = structlog.get_logger("trainer.groups.issue")


@dataclass(frozen=True, slots=True)
class IssuerState:
    """Everything about issued groups at one moment, for a checkpoint and its chapter."""

    dispatch: dict[str, Any]
    totals: dict[str, Any]
    unsent: tuple[tuple[str, ...], ...]  # packs that are issued but not known to be on the stream
    letters_read: int  # sequence number of the last dead letter that is included
    entries: Entries

    def is_in(self, state: CheckpointState) -> bool:
        """Return True if a checkpoint holds exactly this state.

        It can change without an entry: a refused message changes the totals, and perhaps the refused attempts.
        """
        return self.entries.is_empty and (
            (self.dispatch, self.totals, self.unsent, self.letters_read, self.entries.account)
            == (state.dispatch, state.totals, state.unsent, state.letters_read, state.account)
        )


class Issuer:
    """Publishes tasks and tracks the groups they ask for; use as a context manager."""

    def __init__(
        self,
        connections: Connections,
        dispatch: Dispatch,
        counters: Counters,
        accounting: Accounting,
        unsent: Sequence[tuple[str, ...]] = (),
        letters_read: int = 0,
    ) -> None:
        """Issue nothing yet; only this issuer may change ``dispatch``, ``counters`` and the accounting of the train split.

        ``unsent`` are packs that an earlier session issued without a receipt of the stream: they are published first.
        """
        self._dispatch = dispatch
        self._counters = counters
        self._accounting = accounting
        self._unsent = list(unsent)
        self._resends = bool(unsent)
        self._letters_read = letters_read
        self._log: IssueLog | None = None
        self._paused = False
        self._draining = False
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._images = ImageUploads(connections.blobs, connections.run_id)
        self._traced = connections.traced
        self._version = PolicyVersion(0)  # the newest that workers can fetch
        self._trainer_version = PolicyVersion(0)  # the version that the next step starts from
        self._most_outstanding = 0
        self._changed = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._guard, name="issuer", daemon=True)

    def __enter__(self) -> Issuer:
        """Start issuing."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop issuing; groups that are issued stay outstanding."""
        self.stop()
        self._thread.join(30.0)
        if self._log is not None and not self._thread.is_alive():
            self._log.close()

    def keep_log(self, log: IssueLog) -> None:
        """Record in ``log`` what is issued, and accept only what it has of earlier sessions; call it before the start."""
        self._log = log
        self._dispatch.issued_before = log.before

    def pause(self, is_paused: bool) -> None:
        """Issue nothing while ``is_paused``."""
        with self._changed:
            self._paused = is_paused
            self._changed.notify_all()

    def drain(self) -> None:
        """Issue nothing new; what an earlier session issued without a receipt of the stream is still published."""
        with self._changed:
            self._draining = True

    def stop(self) -> None:
        """Issue nothing more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def outstanding(self) -> tuple[str, ...]:
        """Return the ids issued and neither trained nor dropped, sorted: what is issued again must be reproducible."""
        with self._changed:
            return tuple(str(key) for key in sorted(self._dispatch.state.outstanding))

    def accept(self, group_id: str, holds: Callable[[str], bool] = lambda _: False) -> bool:
        """Record that a group arrived; return False if it must not be used. Raises ValueError for a foreign id.

        ``holds`` returns True for groups that have arrived: an older attempt that has is not superseded by a newer one.
        """
        with self._changed:
            before = self._dispatch.state
            is_accepted = self._dispatch.accept(group_id, holds)
            self._counters.groups_scored += is_accepted
            if any(str(key) == group_id for key in before.dead) and is_accepted:
                self._accounting.reopen(group_id)
                log.info("dead-lettered group arrived after all: outstanding again", group_id=group_id)
            elif is_accepted and self._dispatch.state is not before:
                self._accounting.issue("train", [group_id])
                for key in sorted(before.outstanding - self._dispatch.state.outstanding):
                    self._accounting.drop("train", Drop(str(key), DropReason.SUPERSEDED, 0))
            return is_accepted

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the task of a group asked for; raises ValueError for a foreign id."""
        with self._changed:
            return self._dispatch.promise(group_id)

    def is_late(self, version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        """Return True if a group that ``holds`` is False for may be too old for every step after the one at ``version``."""
        with self._changed:
            return self._dispatch.is_late(version, holds)

    def mark_trained(
        self,
        tokens: Mapping[str, int],
        staleness_tokens: dict[int, int],
        *,
        made: PolicyVersion,
        num_reused: int = 0,
        abandoned: Iterable[AbandonedCompletion] = (),
    ) -> None:
        """Close the groups of a batch that were trained for the first time.

        Args:
            tokens: Their sampled tokens, by id.
            staleness_tokens: Of the whole batch, by age.
            made: The version that the step made.
            num_reused: Number of other groups in the batch, closed at an earlier use.
            abandoned: Completions of the first groups that were started and not kept.
        """
        with self._changed:
            self._dispatch.settle(tokens)
            self._trainer_version = made
            self._accounting.use("train", tokens, abandoned=abandoned)
            self._counters.count_batch(staleness_tokens, num_reused=num_reused)
            # A drop may wake the issuer before the next version is announced: the groups wanted must exclude this step.
            self._most_outstanding = max(0, self._most_outstanding - len(tokens) - num_reused)

    def drop(self, drop: Drop) -> None:
        """Close a group that is not trained on; its prompt is issued again while it has attempts left."""
        with self._changed:
            self._drop(drop)
            self._changed.notify_all()

    def drop_dead(self, drops: Sequence[Drop], sequence: int) -> None:
        """Drop the groups of a dead letter, and set the letters read to ``sequence``, in one atomic change."""
        with self._changed:
            for drop in drops:
                self._drop(drop)
            self._letters_read = sequence
            self._changed.notify_all()

    def refuse(self, drop: Drop) -> None:
        """Count a delivered group that is not outstanding."""
        with self._changed:
            self._accounting.refuse("train", drop)

    def advance(self, version: PolicyVersion, groups_wanted: int) -> None:
        """Issue what a newly announced version admits and the rest of the run needs.

        Args:
            version: The newest that workers can fetch.
            groups_wanted: Groups that the remaining steps train.
        """
        with self._changed:
            self._version = version
            if is_newer(version, self._trainer_version):  # the first call of a session
                self._trainer_version = version
            self._most_outstanding = groups_wanted
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the exception that ended the issuing thread, if one did."""
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
            for ids in self._unsent:
                self._accounting.issue("train", ids)
            return packs

    def log_issue(self, packs: Sequence[TaskPack]) -> None:
        """Record packs of `next_packs`, before they are published; raises CheckpointError."""
        if self._log is not None:
            with self._changed:
                position = self._dispatch.state.position
            self._log.append(position, [task.group_id for pack in packs for task in pack.tasks])

    def mark_sent(self) -> None:
        """Record that all packs of `next_packs` are on the stream."""
        with self._changed:
            self._unsent.clear()

    def take_state(self) -> IssuerState:
        """Return the state at one moment; its entries are those since the last call."""
        with self._changed:
            return IssuerState(
                dispatch=self._dispatch.state.to_document(),
                totals=self._counters.to_document(),
                unsent=tuple(self._unsent),
                letters_read=self._letters_read,
                entries=self._accounting.take_entries(),
            )

    def totals(self) -> dict[str, Any]:
        """Return the counts of the run so far."""
        with self._changed:
            return self._counters.to_document()

    def groups(self) -> dict[str, Any]:
        """Return the run's groups so far by outcome, as step events show them."""
        with self._changed:
            state, counters = self._dispatch.state, self._counters
            return {
                "issued": state.num_issued,
                "issued_again": state.num_issued_again,
                "given_up": state.num_given_up,
                "outstanding": len(state.outstanding),
                "scored": counters.groups_scored,
                "trained": counters.groups_trained,
                "reused": counters.groups_reused,
                "dropped": {str(reason): count for reason, count in counters.dropped_groups.items()},
                "abandoned_completions": dict(counters.abandoned_completions),
                "abandoned_tokens": dict(counters.abandoned_tokens),
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
            for pending in [self._publish(pack) for pack in packs]:
                pending.wait()
            self.mark_sent()

    def _drop(self, drop: Drop) -> None:
        """Close a group and queue its prompt again, unless it was dead-lettered: that service has used up its attempts."""
        self._traced.ended(drop.group_id, "dropped", reason=str(drop.reason))
        self._accounting.drop("train", drop)
        if drop.reason is DropReason.DEAD:
            self._dispatch.dead_letter([drop.group_id])
        elif drop.reason is DropReason.NO_SIGNAL:
            self._dispatch.settle([drop.group_id])
        elif self._dispatch.send_back([drop.group_id]):
            log.warning(
                "group dropped at its last attempt: its prompt is skipped", group_id=drop.group_id, reason=drop.reason
            )

    def _publish(self, pack: TaskPack) -> Pending[Receipt]:
        started, traceparent = time.time(), new_trace()
        self._images.store(pack.images)
        stored = self._blobs.put(blob_keys.task_list(self._run_id, pack.pack_id), pack.blob) if pack.blob else None
        pending = self._bus.publish(
            subjects.tasks(self._run_id, "train"),
            pack.announced(self._run_id, stored),
            msg_id=pack.pack_id,
            traceparent=traceparent,
        )
        self._traced.issued(traceparent, pack.tasks, pack_id=pack.pack_id, started=started)
        return pending
