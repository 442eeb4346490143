"""Removes packs and task lists whose time is over (`protocol/config/retention.py`), in a thread beside the training.

What is still needed is read from the outside, as an audit does: the queues in the order in which a group travels,
so that none slips past, then the dead letters, then the record that the newest checkpoint names. The packs of a rescored
input stay, whoever trained on them: they may be another run's only copy. Only who
holds the lease sweeps; two who sweep at once would do nothing worse than delete the same objects twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime

import structlog

from penstock.protocol import blob_keys, streams
from penstock.protocol.config.retention import RetentionSettings, expired
from penstock.protocol.errors import CompareAndSwapFailed, PenstockError, WireError
from penstock.protocol.facts import BlobRef, DeadLetter, GroupGenerated, GroupScored, TaskIssued, decode
from penstock.protocol.record.lineage import CheckpointCommitted, LineageChapter
from penstock.protocol.record.rescored import packs_of_input
from penstock.trainer.connections import Connections

log = structlog.get_logger("trainer.expiry")

SWEEP_S = 600.0
_STAGES: tuple[tuple[str, type[TaskIssued | GroupGenerated | GroupScored]], ...] = (
    ("tasks", TaskIssued),
    ("generated", GroupGenerated),
    ("scored", GroupScored),
)


class Expiry:
    """Sweeps every ten minutes; use as a context manager."""

    def __init__(
        self,
        connections: Connections,
        settings: RetentionSettings,
        *,
        holder: str,
        clock: Callable[[], datetime],
        sweep_s: float = SWEEP_S,
    ) -> None:
        """``clock`` is the time of day in UTC; raises MissingStream when the run was not bootstrapped."""
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._settings = settings
        self._holder = holder.encode()
        self._clock = clock
        self._sweep_s = sweep_s
        self._state, self._leases = (
            connections.bus.key_value(spec(connections.run_id).bucket).wait()
            for spec in (streams.state_bucket, streams.lease_bucket)
        )
        self._last: BlobRef | None = None  # chapter up to which the record is read
        self._trained: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="expiry", daemon=True)

    def __enter__(self) -> Expiry:
        """Begin to sweep."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End after the sweep under way."""
        self._stop.set()
        self._thread.join(30.0)

    def sweep(self) -> list[str]:
        """Do one round; returns the keys that were deleted. Raises BlobError, BusError or WireError."""
        prefixes = (blob_keys.groups_prefix(self._run_id), blob_keys.task_lists_prefix(self._run_id))
        stored = [stat for prefix in prefixes for stat in self._blobs.list(prefix)]
        named = set(self._named()) | packs_of_input(self._run_id, self._blobs)
        self._read_record()
        doomed = expired(stored, named=named, trained=self._trained, settings=self._settings, now=self._clock())
        if doomed:
            self._blobs.delete(doomed)
            log.info("their time was over", num_objects=len(doomed), first=doomed[0])
        return doomed

    def _work(self) -> None:
        while not self._stop.wait(self._sweep_s):
            try:
                if self._has_lease():
                    self.sweep()
            except PenstockError as err:
                log.warning("nothing was expired; tried again", error=str(err))

    def _has_lease(self) -> bool:
        entry = self._leases.get(streams.EXPIRY_LEASE).wait()
        if entry is not None and entry.value != self._holder:
            return False
        try:
            self._leases.swap(streams.EXPIRY_LEASE, self._holder, entry.revision if entry else None).wait()
        except CompareAndSwapFailed:
            return False
        return True

    def _named(self) -> Iterator[str]:
        """Yield the keys that queues and dead letters name; what does not decode names nothing."""
        for stage, kind in _STAGES:
            for message in self._bus.read_stream(f"{self._run_id}-{stage}").wait():
                yield from _keys(message.data, kind)
        kinds = dict(_STAGES)
        for message in self._bus.read_stream(f"{self._run_id}-dead").wait():
            letter = decode(message.data, DeadLetter)
            if letter.stage in kinds:
                yield from _keys(letter.payload, kinds[letter.stage])

    def _read_record(self) -> None:
        """Learn which packs the committed steps name; chapters are read once."""
        entry = self._state.get(streams.CHECKPOINT_KEY).wait()
        newest = None if entry is None else decode(entry.value, CheckpointCommitted).record
        at = newest
        while at is not None and at != self._last:
            chapter = decode(self._blobs.get(at), LineageChapter)
            self._trained.update(pack.key for step in chapter.steps for pack in step.packs)
            at = chapter.parent
        self._last = newest


def _keys(data: bytes, kind: type[TaskIssued | GroupGenerated | GroupScored]) -> Iterator[str]:
    try:
        fact = decode(data, kind)
    except WireError:
        return
    ref = fact.tasks_blob if isinstance(fact, TaskIssued) else fact.pack
    if ref is not None:
        yield ref.key
