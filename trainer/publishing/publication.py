"""One version from a snapshot to the announcement: store, move the head, announce.

| killed after     | what is left                     | the next session                                         |
|------------------|----------------------------------|----------------------------------------------------------|
| the objects      | objects that no manifest names   | garbage collection removes them as orphans               |
| the manifest     | a manifest that no head leads to | ignored; the next version takes its number               |
| the head         | a complete version, unannounced  | announced again at the start; workers watch the head too |
| the announcement | nothing is missing               | continues from it                                        |

The head of a run in NATS KV is moved by compare-and-swap by one trainer only.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusUnreachable, CompareAndSwapFailed
from penstock.protocol.facts import Head, WeightsPublished, decode, encode
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.version_reader import UNUSABLE
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.model_versions import ModelVersions
from penstock.trainer.publishing.rank_publisher import PublishCoordinator
from penstock.trainer.publishing.version_writer import AdapterVersions, Label, VersionWriter, Written
from penstock.trainer.publishing.weight_buckets import AdapterBase, AdapterWeights, ModelWeights, Snapshot, Weights
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

log = structlog.get_logger("trainer.publication")

_SWAP_DEADLINE_S = 120.0

UNCHANGED_VERSIONS = 2
MOST_KNOWN = 4096  # groups that are sampled by an older version are stale


def read_head(state: KeyValue) -> Head | None:
    entry = state.get(streams.HEAD_KEY).wait()
    return None if entry is None else decode(entry.value, Head)


class HeadKey:
    def __init__(self, bus: Bus, run_id: str) -> None:
        self._run_id = run_id
        self._state = bus.key_value(streams.state_bucket(run_id).bucket).wait()
        self.value = read_head(self._state)

    def move(self, head: Head) -> None:
        """Move the head; raises PublicationFailed if another trainer moved it, BusUnreachable after two minutes."""
        value = encode(head)
        deadline = time.monotonic() + _SWAP_DEADLINE_S
        revision = self._expected_revision(deadline)
        while True:
            try:
                self._state.swap(streams.HEAD_KEY, value, revision).wait()
                break
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise
            except CompareAndSwapFailed:
                entry = self._read(deadline)
                if entry is None or entry.value != value:
                    raise PublicationFailed(
                        f"another trainer moved the head of run {self._run_id} while this one published version "
                        f"{head.version}; stop one of the two, or give it another run.id"
                    ) from None
                break
        self.value = head

    def _read(self, deadline: float) -> Entry | None:
        while True:
            try:
                return self._state.get(streams.HEAD_KEY).wait()
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise

    def _expected_revision(self, deadline: float) -> int | None:
        entry = self._read(deadline)
        if entry is None:
            return None
        if self.value is None or decode(entry.value, Head) != self.value:
            raise PublicationFailed(
                f"the head of run {self._run_id} is not the version that this trainer published last: another trainer "
                "publishes to the run; stop one of the two, or give it another run.id"
            )
        return entry.revision


class PublishedVersions:
    """Versions of all sessions of a run. Not thread-safe: the owner locks."""

    def __init__(self, announced: Collection[PolicyVersion], head: PolicyVersion | None) -> None:
        """Know the versions ``announced`` in the stream, which loses the oldest first, and the head."""
        self._versions = {*announced, *(() if head is None else (head,))}
        self._unknown_before = min(self._versions, default=PolicyVersion(0))

    def add(self, version: PolicyVersion) -> None:
        self._versions.add(version)
        if len(self._versions) > 2 * MOST_KNOWN:
            self._versions = set(sorted(self._versions)[-MOST_KNOWN:])
            self._unknown_before = min(self._versions)

    def never_published(self, versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        return sorted(v for v in {*versions} - self._versions if v >= self._unknown_before)


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of publishing one version; times in seconds of wall-clock time."""

    version: PolicyVersion
    step: int
    kind: str  # "patch", "anchor" (a full snapshot) or "adapter"
    parent: int | None
    density: float  # share of the values whose bits changed since the parent
    raw_bytes: int  # of the whole model
    sent_bytes: int
    diff_s: float  # compare and encode
    upload_s: float  # objects, manifest, and the check of the listing
    publish_s: float  # in total, with the head and the announcement
    is_unchanged: bool = False  # engines serve the same as with the head before

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds by stage, one after the other: ``publish_s`` in all."""
        announce_s = self.publish_s - self.diff_s - self.upload_s
        return {"compare": self.diff_s, "upload": self.upload_s, "announce": announce_s}


class UnchangedVersions:
    """Notices versions in a row that equal the one before although optimizer steps lie between them; thread-safe."""

    def __init__(self) -> None:
        self._updated: list[PolicyVersion] = []  # made by an optimizer step, and not published since
        self._num_unchanged = 0
        self._lock = threading.Lock()

    def updated(self, version: PolicyVersion) -> None:
        with self._lock:
            self._updated.append(version)

    def published(self, publication: Publication) -> str:
        """Return the text of an alarm for the `UNCHANGED_VERSIONS`-th of them in a row; else an empty one."""
        with self._lock:
            waiting = [version for version in self._updated if version > publication.version]
            num_updates, self._updated = len(self._updated) - len(waiting), waiting
            if not publication.is_unchanged:
                self._num_unchanged = 0
            elif num_updates:
                self._num_unchanged += 1
            if not (publication.is_unchanged and num_updates and self._num_unchanged == UNCHANGED_VERSIONS):
                return ""
        return (
            f"version {publication.version}, and the one before it, serve the same as the version before them, although the optimizer made "
            "steps: workers sample an old policy. The changes are smaller than the rounding of what is published, or of weights that are "
            "not: raise trainer.lr, publish adapters alone (model.lora.publish) or more digits (trainer.publish_dtype, model.dtype)"
        )


class VersionPublisher:
    """Publishes one snapshot after another. Used by one thread."""

    def __init__(
        self, connections: Connections, writer: VersionWriter, coordinator: PublishCoordinator, *, policy: FullSnapshotPolicy,
        epoch: int,
    ) -> None:  # fmt: skip
        self._run_id, self._bus, self._writer = connections.run_id, connections.bus, writer
        self._epoch = epoch
        self.head = HeadKey(connections.bus, connections.run_id)
        self.models = ModelVersions(writer, coordinator, policy=policy, epoch=epoch)
        self._adapters = AdapterVersions(connections, writer, coordinator, epoch=epoch)
        self.newest: Written | None = None

    def missing_base(self, weights: Weights) -> AdapterBase | None:
        """Return the base that these weights need and that is not stored, else None."""
        if isinstance(weights, ModelWeights) or self._adapters.find_base(weights.base, self._read_newest()) is not None:
            return None
        return weights.base

    def store_base(self, base: AdapterBase, version: PolicyVersion, step: int, dtype: str) -> None:
        """Store adapters' base under a number that no head names; raises BlobError or PublicationFailed."""
        self._adapters.store_base(base, Label(version, step, self._epoch), self._writer.small_files(dtype))

    def resume(self, weights: Weights, dtype: str) -> bool:
        """Return True if these weights equal the head's bit for bit; the next version then follows on it."""
        newest = self._read_newest()
        return newest is not None and self._kind(weights).resume(weights, dtype, newest)

    def announce_head(self) -> None:
        """Announce the head of a session that was killed before it did; one whose manifest is unreadable is not."""
        if (newest := self._read_newest()) is not None:
            self._announce(newest)

    def publish(self, snapshot: Snapshot[Any]) -> Publication:
        started = time.monotonic()
        kind = self._kind(snapshot.weights)
        newest = self._read_newest()
        stored = kind.store(snapshot, newest)
        stored_s = time.monotonic() - started
        self._commit(stored.written)
        kind.committed(snapshot, stored.written)
        manifest = stored.written.manifest
        return Publication(
            version=snapshot.version, step=snapshot.step, kind=manifest.kind,
            parent=manifest.parent.version if manifest.parent else None, density=stored.density, raw_bytes=stored.raw_bytes,
            sent_bytes=manifest.num_bytes + stored.written.reference.size_bytes, diff_s=stored.diff_s, upload_s=stored_s - stored.diff_s,
            publish_s=time.monotonic() - started, is_unchanged=newest is not None and newest.manifest.state_root == manifest.state_root,
        )  # fmt: skip

    def publish_again(self) -> bool:
        """Publish the newest version again under the same number, because workers could not use it as it was.

        It does not wait for a step: there may be none while no worker can sample. Returns False if it could not be
        done; the next version is then a full snapshot.
        """
        newest = self._read_newest()
        if newest is None:
            return False
        kind = self._adapters if newest.manifest.kind == "adapter" else self.models
        written = kind.store_again(newest)
        if written is None:
            return False
        self._commit(written)
        log.warning("published again: workers refused the version", policy_version=written.manifest.version)
        return True

    def _kind(self, weights: Weights) -> Any:
        return self._adapters if isinstance(weights, AdapterWeights) else self.models

    def _commit(self, written: Written) -> None:
        crash_points.reach(CrashPoint.MANIFEST_STORED)
        manifest = written.manifest
        self.head.move(
            Head(version=manifest.version, step=manifest.step, manifest=written.reference, epoch=self._epoch)
        )
        crash_points.reach(CrashPoint.HEAD_MOVED)
        self.newest = written
        self._announce(written)
        crash_points.reach(CrashPoint.ANNOUNCED)

    def _announce(self, written: Written) -> None:
        manifest = written.manifest
        subject = subjects.weights_published(self._run_id)
        fact = WeightsPublished(
            run_id=self._run_id, version=manifest.version, step=manifest.step, manifest=written.reference, num_bytes=manifest.num_bytes,
        )  # fmt: skip
        msg_id = f"w:{manifest.version}:{written.reference.sha256[:16]}"
        if self._bus.publish(subject, fact, msg_id=msg_id).wait().duplicate:
            stored = self._bus.read_stream(f"{self._run_id}-weights", subject).wait()
            if encode(fact) not in [message.data for message in stored]:  # a worker's message took the id
                self._bus.publish(subject, fact, msg_id=f"{msg_id}:{secrets.token_hex(8)}").wait()

    def _read_newest(self) -> Written | None:
        head = self.head.value
        if self.newest is None and head is not None:
            try:
                manifest = self._writer.reader().manifest(head.manifest, PolicyVersion(head.version))
            except UNUSABLE as err:
                log.warning("the head's manifest is unreadable: publishing without a parent", error=str(err))
                return None
            self.newest = Written(manifest, head.manifest)
        return self.newest
