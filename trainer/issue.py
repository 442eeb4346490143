"""Issues tasks as soon as the staleness bound admits them, in a thread of its own.

Everything that happens to an issued group passes here, under one lock: it arrives, is trained, is
dropped (and perhaps issued again), and makes room for the next ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import structlog

from protocol import blob_keys, subjects
from protocol.errors import PenstockError
from protocol.trace import new_trace
from protocol.transport.pending import Pending
from protocol.transport.publication import Receipt
from protocol.versions import PolicyVersion
from trainer.batcher import Drop
from trainer.dispatch import Dispatch
from trainer.doors import Doors
from trainer.drops import DropReason
from trainer.tally import Tally
from trainer.task_packs import TaskPack

log = structlog.get_logger("trainer.issue")

# A dead group was tried as often as the service that buried it tries; the others may do better next time.
_FINAL = frozenset({DropReason.DEAD, DropReason.NO_SIGNAL})


class Issuer:
    """Keeps the workers supplied; use as a context manager."""

    def __init__(self, doors: Doors, dispatch: Dispatch, tally: Tally) -> None:
        """Issue nothing yet; ``dispatch`` and ``tally`` are owned by this issuer from now on."""
        self._dispatch = dispatch
        self._tally = tally
        self._run_id, self._bus, self._blobs = doors.run_id, doors.bus, doors.blobs
        self._version = PolicyVersion(0)
        self._most_outstanding = 0
        self._changed = threading.Condition()
        self._closing = False
        self._failure: PenstockError | None = None
        self._thread = threading.Thread(target=self._work, name="issuer", daemon=True)

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

    def expects(self, group_id: str) -> bool:
        """Take note of a group that arrived; False when it must not be used. Raises ValueError for a foreign id."""
        with self._changed:
            expected = self._dispatch.expects(group_id)
            self._tally.groups_scored += expected
            return expected

    def trained(self, group_ids: Iterable[str], staleness_tokens: dict[int, int]) -> None:
        """Close a batch that was trained."""
        ids = list(group_ids)
        with self._changed:
            self._dispatch.settle(ids)
            self._tally.count_batch(len(ids), staleness_tokens)

    def dropped(self, drop: Drop) -> None:
        """Close a group that is not trained on; its prompt comes again while it has attempts left."""
        with self._changed:
            self._tally.count_drop(drop)
            if drop.reason in _FINAL:
                self._dispatch.settle([drop.group_id])
            elif self._dispatch.send_back([drop.group_id]):
                log.warning("given up", group_id=drop.group_id, reason=drop.reason)
            self._changed.notify_all()

    def refused(self, drop: Drop) -> None:
        """Count a group that came although nobody waits for it."""
        with self._changed:
            self._tally.count_drop(drop)

    def advance(self, version: PolicyVersion, groups_wanted: int) -> None:
        """Issue what a newly published version admits, and the rest of the run needs.

        The version is one that has been published: what the workers can have.
        """
        with self._changed:
            self._version = version
            self._most_outstanding = groups_wanted
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the issuing thread."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def documents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return dispatch state and tally at one moment, as a checkpoint holds them."""
        with self._changed:
            return self._dispatch.state.to_document(), self._tally.to_document()

    def groups(self) -> dict[str, Any]:
        """Return what became of the run's groups so far, as the step events show it."""
        with self._changed:
            state, tally = self._dispatch.state, self._tally
            return {
                "issued": state.num_issued,
                "issued_again": state.num_issued_again,
                "given_up": state.num_given_up,
                "outstanding": len(state.outstanding),
                "scored": tally.groups_scored,
                "trained": tally.groups_trained,
                "dropped": {str(reason): count for reason, count in tally.dropped_groups.items()},
            }

    def _work(self) -> None:
        while True:
            with self._changed:
                packs = [] if self._closing else self._dispatch.next_packs(self._version, self._most_outstanding)
                if not packs:
                    if self._closing:
                        return
                    self._changed.wait()
                    continue
            try:
                for pending in [self._publish(pack) for pack in packs]:
                    pending.wait()
            except PenstockError as err:
                with self._changed:
                    self._failure = err
                return

    def _publish(self, pack: TaskPack) -> Pending[Receipt]:
        stored = self._blobs.put(blob_keys.task_list(self._run_id, pack.pack_id), pack.blob) if pack.blob else None
        return self._bus.publish(
            subjects.tasks(self._run_id, "train"),
            pack.announced(self._run_id, stored),
            msg_id=pack.pack_id,
            traceparent=new_trace(),
        )
