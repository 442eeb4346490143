"""Deletes packs, ended episodes, task lists and log-probabilities whose retention has ended (`protocol/config/shared_sections.py`), in a separate thread.

What is still needed is read from storage, as an audit does: the queues in the order in which a group passes them, so that
none is missed, then the dead letters, then the record that the newest checkpoint names. The packs of a rescored input
are never deleted: they may be another run's only copy. Only the holder of the lease sweeps; two sweeps at once would
delete the same objects twice, which is harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime

import structlog

from penstock.protocol import blob_keys, streams
from penstock.protocol.config.shared_sections import RetentionSettings, expired
from penstock.protocol.errors import PenstockError, WireError
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored, TaskIssued, decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.lineage import CheckpointCommitted, LineageChapter
from penstock.protocol.record.stored_record import packs_of_input
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.weight_gc import holds_lease

log = structlog.get_logger("trainer.recovery.group_gc")

SWEEP_S = 600.0
_SWEEPS_PER_RETENTION = 4  # an object is kept at most a quarter longer than its retention
_SHORTEST_SWEEP_S = 10.0
_STAGES: tuple[tuple[str, type[TaskIssued | GroupGenerated | GroupScored]], ...] = (
    ("tasks", TaskIssued),
    ("generated", GroupGenerated),
    ("scored", GroupScored),
)


class GroupGc:
    """Sweeps every ten minutes, or more often when packs are kept for less than forty; use as a context manager."""

    def __init__(
        self, connections: Connections, settings: RetentionSettings, *, holder: str, clock: Callable[[], datetime]
    ) -> None:
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._settings = settings
        self._holder = holder.encode()
        self._clock = clock
        self._sweep_s = sweep_period_s(settings)
        self._state, self._leases = (
            connections.bus.key_value(spec(connections.run_id).bucket).wait()
            for spec in (streams.state_bucket, streams.lease_bucket)
        )
        self._last: BlobRef | None = None  # newest chapter of the record that was read
        self._trained: set[str] = set()
        self._steps: set[str] = set()  # prefixes of the log-probabilities of committed steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="group-gc", daemon=True)

    def __enter__(self) -> GroupGc:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30.0)

    def sweep(self) -> list[str]:
        run = self._run_id
        prefixes = (
            blob_keys.groups_prefix(run),
            blob_keys.all_finished_episodes_prefix(run),
            blob_keys.task_lists_prefix(run),
            blob_keys.logprobs_prefix(run),
        )
        stored = [stat for prefix in prefixes for stat in self._blobs.list(prefix)]
        named = set(self._named()) | packs_of_input(run, self._blobs)
        if self._settings.trained_packs_h:  # before the record is read: a pack may be newer than the listing
            self._trained.intersection_update(stat.key for stat in stored)
        self._read_record()
        trained = self._trained | {stat.key for stat in stored if stat.key.rpartition("/")[0] in self._steps}
        keys = expired(stored, named=named, trained=trained, settings=self._settings, now=self._clock())
        if keys:
            self._blobs.delete(keys)
            log.info("expired objects deleted", num_objects=len(keys), first=keys[0])
        return keys

    def _work(self) -> None:
        while not self._stop.wait(self._sweep_s):
            try:
                if holds_lease(self._leases, streams.EXPIRY_LEASE, self._holder):
                    self.sweep()
            except PenstockError as err:
                log.warning("sweep failed; repeated at the next interval", error=str(err))

    def _named(self) -> Iterator[str]:
        for stage, kind in _STAGES:
            for message in self._bus.read_stream(f"{self._run_id}-{stage}").wait():
                yield from _keys(message.data, kind)
        kinds = dict(_STAGES)
        for message in self._bus.read_stream(f"{self._run_id}-dead").wait():
            try:
                letter = decode(message.data, DeadLetter)
            except WireError:
                continue
            if letter.stage in kinds:
                yield from _keys(letter.payload, kinds[letter.stage])

    def _read_record(self) -> None:
        entry = self._state.get(streams.CHECKPOINT_KEY).wait()
        newest = None if entry is None else decode(entry.value, CheckpointCommitted).record
        at = newest
        while at is not None and at != self._last:
            chapter = decode(self._blobs.get(at), LineageChapter)
            self._trained.update(pack.key for step in chapter.steps for pack in step.packs)
            self._steps.update(
                blob_keys.step_logprobs_prefix(self._run_id, step.step, step.epoch).rstrip("/")
                for step in chapter.steps
            )
            at = chapter.parent
        self._last = newest


def sweep_period_s(settings: RetentionSettings) -> float:
    hours = [hours for hours in (settings.trained_packs_h, settings.unused_packs_h) if hours]
    return min(SWEEP_S, max(_SHORTEST_SWEEP_S, 3600.0 * min(hours) / _SWEEPS_PER_RETENTION))


def _keys(data: bytes, kind: type[TaskIssued | GroupGenerated | GroupScored]) -> Iterator[str]:
    try:
        fact = decode(data, kind)
    except WireError:
        return
    ref = fact.tasks_blob if isinstance(fact, TaskIssued) else fact.pack
    if ref is not None:
        yield ref.key
