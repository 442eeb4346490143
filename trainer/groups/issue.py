"""Issues tasks as soon as the staleness bound admits them, in a thread of its own.

Everything that happens to an issued group passes here, under one lock: it arrives, is trained, is
dropped (and perhaps issued again), and makes room for the next ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocol import blob_keys, subjects
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.trace_context import new_trace
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.pending import Pending
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.trainer.connections import Connections
from penstock.trainer.groups.accounting import Accounting, Entries
from penstock.trainer.groups.batcher import Drop
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.drops import DropReason
from penstock.trainer.groups.task_packs import TaskPack

log = structlog.get_logger("trainer.issue")


@dataclass(frozen=True, slots=True)
class IssuerState:
    """Everything about issued groups at one moment, as a checkpoint and its chapter hold it."""

    dispatch: dict[str, Any]
    totals: dict[str, Any]
    unsent: tuple[tuple[str, ...], ...]  # packs that are issued but not known to be on the stream
    letters_read: int  # sequence number of the last dead letter that all this knows
    entries: Entries

    def is_in(self, state: CheckpointState) -> bool:
        """Say whether a checkpoint tells all of this.

        What changes without an entry counts too: a refused message is counted, and the attempt it brought is remembered.
        """
        return self.entries.is_empty and (
            (self.dispatch, self.totals, self.unsent, self.letters_read, self.entries.account)
            == (state.dispatch, state.totals, state.unsent, state.letters_read, state.account)
        )


class Issuer:
    """Keeps the workers supplied; use as a context manager."""

    def __init__(
        self,
        connections: Connections,
        dispatch: Dispatch,
        counters: Counters,
        account: Accounting,
        unsent: Sequence[tuple[str, ...]] = (),
        letters_read: int = 0,
    ) -> None:
        """Issue nothing yet; ``dispatch``, ``tally`` and the train book of ``account`` are owned by this issuer now.

        ``unsent`` are packs that an earlier life had issued without seeing them arrive: they go out first.
        """
        self._dispatch = dispatch
        self._counters = counters
        self._account = account
        self._unsent = list(unsent)
        self._resends = bool(unsent)
        self._letters_read = letters_read
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._version = PolicyVersion(0)  # the newest that workers can have
        self._trainer_version = PolicyVersion(0)  # what the next step starts from
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
        """Stop issuing; what is issued stays issued."""
        self.stop()
        self._thread.join(30.0)

    def stop(self) -> None:
        """Issue nothing more: the run ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def outstanding(self) -> tuple[str, ...]:
        """Return the ids issued and neither trained nor dropped, in order: what is issued again must not depend on hashes."""
        with self._changed:
            return tuple(str(key) for key in sorted(self._dispatch.state.outstanding))

    def expects(self, group_id: str, holds: Callable[[str], bool] = lambda _: False) -> bool:
        """Take note of a group that arrived; False when it must not be used. Raises ValueError for a foreign id.

        ``holds`` says which groups are here already: an older attempt that is here is not given up for a newer.
        """
        with self._changed:
            before = self._dispatch.state
            expected = self._dispatch.expects(group_id, holds)
            self._counters.groups_scored += expected
            if any(str(key) == group_id for key in before.dead) and expected:
                self._account.revive(group_id)
                self._counters.revive()
                log.info("alive again", group_id=group_id)
            elif expected and self._dispatch.state is not before:
                self._account.issue("train", [group_id])
                for key in sorted(before.outstanding - self._dispatch.state.outstanding):
                    self._close(Drop(str(key), DropReason.SUPERSEDED, 0))
            return expected

    def in_last_chance(self, version: PolicyVersion) -> list[str]:
        """Return what is outstanding and may be too old for every step after the one at ``version``."""
        with self._changed:
            return self._dispatch.in_last_chance(version)

    def trained(
        self,
        tokens: Mapping[str, int],
        staleness_tokens: dict[int, int],
        *,
        made: PolicyVersion,
        num_reused: int = 0,
    ) -> None:
        """Close the groups of a batch that were trained for the first time.

        Args:
            tokens: Their sampled tokens, by id.
            staleness_tokens: Of the whole batch, by age.
            made: The version that the step made.
            num_reused: How many other groups of the batch were closed before.
        """
        with self._changed:
            self._dispatch.settle(tokens)
            self._trainer_version = made
            self._account.use("train", tokens)
            self._counters.count_batch(len(tokens), staleness_tokens, num_reused=num_reused)
            # A drop may wake the issuer before the next version is announced: what it says is wanted then counts this step too.
            self._most_outstanding = max(0, self._most_outstanding - len(tokens) - num_reused)

    def dropped(self, drop: Drop) -> None:
        """Close a group that is not trained on; its prompt comes again while it has attempts left."""
        with self._changed:
            self._drop(drop)
            self._changed.notify_all()

    def read_letter(self, drops: Sequence[Drop], sequence: int) -> None:
        """Drop what a dead letter is about, and note as one act that the letters are read up to ``sequence``."""
        with self._changed:
            for drop in drops:
                self._drop(drop)
            self._letters_read = sequence
            self._changed.notify_all()

    def refused(self, drop: Drop) -> None:
        """Count a group that came although nobody waits for it."""
        with self._changed:
            self._counters.count_drop(drop)
            self._account.refuse("train", drop)

    def advance(self, version: PolicyVersion, groups_wanted: int) -> None:
        """Issue what a newly published version admits, and the rest of the run needs.

        The version is one that has been published: what the workers can have.
        """
        with self._changed:
            self._version = version
            if is_newer(version, self._trainer_version):  # a life begins
                self._trainer_version = version
            self._most_outstanding = groups_wanted
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the issuing thread."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def next_packs(self) -> list[TaskPack]:
        """Issue what can be issued now; the packs are to be published, and `sent` says that they were."""
        with self._changed:
            if self._resends:
                if self._most_outstanding == 0:  # no version is announced yet
                    return []
                self._resends = False
                return [self._dispatch.pack_again(ids, self._version) for ids in self._unsent]
            packs = self._dispatch.next_packs(
                self._version, self._most_outstanding, trainer_version=self._trainer_version
            )
            self._unsent = [tuple(task.group_id for task in pack.tasks) for pack in packs]
            for ids in self._unsent:
                self._account.issue("train", ids)
            return packs

    def sent(self) -> None:
        """Say that all packs of `next_packs` are on the stream."""
        with self._changed:
            self._unsent.clear()

    def take_state(self) -> IssuerState:
        """Return everything at one moment; the entries are those since the last call."""
        with self._changed:
            return IssuerState(
                dispatch=self._dispatch.state.to_document(),
                totals=self._counters.to_document(),
                unsent=tuple(self._unsent),
                letters_read=self._letters_read,
                entries=self._account.take_entries(),
            )

    def totals(self) -> dict[str, Any]:
        """Return the counters of the run so far."""
        with self._changed:
            return self._counters.to_document()

    def groups(self) -> dict[str, Any]:
        """Return what became of the run's groups so far, as the step events show it."""
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
            for pending in [self._publish(pack) for pack in packs]:
                pending.wait()
            self.sent()

    def _drop(self, drop: Drop) -> None:
        """Close a group; a dead one was tried as often as the service that buried it tries, others may do better."""
        self._close(drop)
        if drop.reason is DropReason.DEAD:
            self._dispatch.bury([drop.group_id])
        elif drop.reason is DropReason.NO_SIGNAL:
            self._dispatch.settle([drop.group_id])
        elif self._dispatch.send_back([drop.group_id]):
            log.warning("given up", group_id=drop.group_id, reason=drop.reason)

    def _close(self, drop: Drop) -> None:
        self._counters.count_drop(drop)
        self._account.drop("train", drop)

    def _publish(self, pack: TaskPack) -> Pending[Receipt]:
        stored = self._blobs.put(blob_keys.task_list(self._run_id, pack.pack_id), pack.blob) if pack.blob else None
        return self._bus.publish(
            subjects.tasks(self._run_id, "train"),
            pack.announced(self._run_id, stored),
            msg_id=pack.pack_id,
            traceparent=new_trace(),
        )
