"""Publishes versions: shards, then manifest, verified, then the head in NATS KV, then the announcement.

The training thread only hands over a snapshot; a thread of its own uploads while the next step runs.
When storage is slower than the steps, a snapshot that nobody has begun to upload is replaced by the
next one (its version is skipped and counted), unless somebody needs exactly that version.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from torch import Tensor

from protocol import blob_keys, streams, subjects
from protocol.errors import BusUnreachable, CompareAndSwapFailed, PenstockError
from protocol.facts import BlobRef, Head, WeightsPublished, decode, encode
from protocol.transport.blobs import BlobStat
from protocol.transport.key_value import KeyValue
from protocol.versions import PolicyVersion
from protocol.weights import ModelFile, WeightsManifest
from trainer import crash_points
from trainer.crash_points import CrashPoint
from trainer.doors import Doors
from trainer.errors import PublicationFailed
from trainer.model_folder import MAX_SHARD_BYTES, Shards, shard_bytes, small_files, split_shards

log = structlog.get_logger("trainer.publish")

_SWAP_DEADLINE_S = 120.0
_COLLECT_GARBAGE_AT = 4  # surplus versions, so that one listing serves several deletions


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version's weights on the CPU, as they were when the step ended."""

    version: PolicyVersion
    step: int
    tensors: dict[str, Tensor]
    num_parameters: int
    dtype: str
    must_publish: bool = False  # an evaluation is pinned to it, or it is the last


def read_head(state: KeyValue) -> Head | None:
    """Return the newest complete version of the run, None before the first."""
    entry = state.get(streams.HEAD_KEY).wait()
    return None if entry is None else decode(entry.value, Head)


class Publisher:
    """Uploads snapshots in a thread of its own. Errors surface at the next call of the training thread."""

    def __init__(
        self,
        doors: Doors,
        *,
        model_folder: Path,
        keep_versions: int,
        on_published: Callable[[PolicyVersion], None] = lambda _: None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        epoch: int = 0,
    ) -> None:
        """Read where the run stands and start the thread; raises MissingStream when it was not bootstrapped.

        Args:
            doors: The run, NATS and the object store.
            model_folder: Where config and tokenizer come from.
            keep_versions: Newest versions that stay in the object store.
            on_published: Called on the publisher's thread for every version that has been announced.
            max_shard_bytes: Largest file of weights.
            epoch: Of this trainer's lease; a head of another epoch is not moved.
        """
        self._run_id, self._bus, self._blobs = doors.run_id, doors.bus, doors.blobs
        self._model_folder = model_folder
        self._keep_versions = keep_versions
        self._on_published = on_published
        self._max_shard_bytes = max_shard_bytes
        self._epoch = epoch
        self._state = doors.bus.key_value(streams.state_bucket(doors.run_id).bucket).wait()
        self.head = read_head(self._state)
        self._small: tuple[ModelFile, ...] | None = None
        self._stored = {blob_keys.version_of_weights(doors.run_id, s.key) for s in self._list_all()}
        self._published = {PolicyVersion(self.head.version)} if self.head else set[PolicyVersion]()
        self._pinned: set[PolicyVersion] = set()
        self._waiting: list[Snapshot] = []
        self._failure: PenstockError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self.num_published = 0
        self.num_skipped = 0
        self.publish_s = 0.0  # of the newest publication
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot; raises PublicationFailed when an earlier one failed."""
        with self._changed:
            self._raise_failure()
            if snapshot.must_publish:
                self._pinned.add(snapshot.version)
            overtaken = [s for s in self._waiting if not s.must_publish]
            self.num_skipped += len(overtaken)
            self._waiting = [s for s in self._waiting if s.must_publish] + [snapshot]
            self._changed.notify_all()

    def check(self) -> None:
        """Raise PublicationFailed when a publication has failed."""
        with self._changed:
            self._raise_failure()

    def is_published(self, version: PolicyVersion) -> bool:
        """Say whether a version is complete and announced; raises PublicationFailed."""
        with self._changed:
            self._raise_failure()
            return version in self._published

    def wait_until_published(self, version: PolicyVersion, deadline_s: float) -> None:
        """Wait for a submitted version; raises PublicationFailed after ``deadline_s``."""
        deadline = time.monotonic() + deadline_s
        with self._changed:
            while version not in self._published:
                self._raise_failure()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PublicationFailed(
                        f"version {version} was not published within {deadline_s:.0f} s; waited for the object store "
                        f"(bucket {self._blobs.bucket}) and NATS at {self._bus.url}"
                    )

    def unpin(self, version: PolicyVersion) -> None:
        """Allow garbage collection of a version that had to be published."""
        with self._changed:
            self._pinned.discard(version)

    def close(self, deadline_s: float = 120.0) -> None:
        """Finish what was submitted and end the thread; raises what it raised."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        with self._changed:
            self._raise_failure()
        if self._thread.is_alive():
            raise PublicationFailed(f"the last version was not published within {deadline_s:.0f} s of the run's end")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PublicationFailed(f"weights could not be published: {self._failure}") from self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                snapshot = self._waiting.pop(0)
            started = time.monotonic()
            try:
                self._publish(snapshot)
                self._note(snapshot.version, time.monotonic() - started)
                self._collect_garbage()
            except PenstockError as err:
                log.error("publication failed", policy_version=snapshot.version, error=str(err))  # noqa: TRY400
                with self._changed:
                    self._failure = err
                    self._changed.notify_all()
                return

    def _note(self, version: PolicyVersion, publish_s: float) -> None:
        with self._changed:
            self.publish_s = publish_s
            self.num_published += 1
            self._published.add(version)
            self._changed.notify_all()
        self._on_published(version)

    def _publish(self, snapshot: Snapshot) -> None:
        shards = split_shards(snapshot.tensors, self._max_shard_bytes)
        if self._small is None:
            self._small = self._put_small_files(shards, snapshot.dtype)
        attempt = secrets.token_hex(4)
        self._stored.add(snapshot.version)
        manifest = WeightsManifest(
            run_id=self._run_id,
            version=snapshot.version,
            step=snapshot.step,
            dtype=snapshot.dtype,
            num_parameters=snapshot.num_parameters,
            shards=tuple(self._put_shard(snapshot.version, attempt, name, part) for name, part in shards.items()),
            model_files=self._small,
        )
        crash_points.reach(CrashPoint.SHARDS_STORED)
        key = blob_keys.weights_manifest(self._run_id, snapshot.version, attempt)
        reference = self._blobs.put(key, manifest.to_json())
        self._verify(snapshot.version, [*(shard.blob for shard in manifest.shards), reference])
        crash_points.reach(CrashPoint.MANIFEST_STORED)
        head = Head(version=snapshot.version, step=snapshot.step, manifest=reference, epoch=self._epoch)
        self._move_head(head)
        crash_points.reach(CrashPoint.HEAD_MOVED)
        self._announce(head, manifest.num_bytes)
        crash_points.reach(CrashPoint.ANNOUNCED)

    def announce_again(self) -> None:
        """Announce the head once more: an earlier life may have ended between moving and announcing it."""
        if self.head is not None:
            self._announce(self.head, WeightsManifest.from_json(self._blobs.get(self.head.manifest)).num_bytes)

    def _announce(self, head: Head, num_bytes: int) -> None:
        self._bus.publish(
            subjects.weights_published(self._run_id),
            WeightsPublished(
                run_id=self._run_id, version=head.version, step=head.step, manifest=head.manifest, num_bytes=num_bytes
            ),
            msg_id=f"w:{head.version}:{head.epoch}",
        ).wait()

    def _put_shard(self, version: PolicyVersion, attempt: str, name: str, shard: dict[str, Tensor]) -> ModelFile:
        key = blob_keys.weights_shard(self._run_id, version, attempt, name)
        return ModelFile(name=name, blob=self._blobs.put(key, shard_bytes(shard)))

    def _put_small_files(self, shards: Shards, dtype: str) -> tuple[ModelFile, ...]:
        files = []
        for name, data in small_files(self._model_folder, shards, dtype).items():
            digest = hashlib.sha256(data).hexdigest()
            key = blob_keys.model_file(self._run_id, digest, name)
            known = BlobRef(key=key, size_bytes=len(data), sha256=digest)
            files.append(ModelFile(name=name, blob=known if self._blobs.exists(key) else self._blobs.put(key, data)))
        return tuple(files)

    def _verify(self, version: PolicyVersion, references: list[BlobRef]) -> None:
        stored = {s.key: s.size_bytes for s in self._blobs.list(blob_keys.weights_prefix(self._run_id, version))}
        for reference in references:
            if stored.get(reference.key) != reference.size_bytes:
                raise PublicationFailed(
                    f"{reference.key}: stored {reference.size_bytes} bytes, the object store lists "
                    f"{stored.get(reference.key, 'no such object')}; version {version} is not announced"
                )

    def _move_head(self, head: Head) -> None:
        """Move the head by compare-and-swap; a swap whose answer was lost is recognised as our own."""
        value = encode(head)
        deadline = time.monotonic() + _SWAP_DEADLINE_S
        revision = self._expect_head()
        while True:
            try:
                self._state.swap(streams.HEAD_KEY, value, revision).wait()
                break
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise
            except CompareAndSwapFailed:
                if not self._head_is(value, deadline):
                    raise PublicationFailed(
                        f"another trainer moved the head of run {self._run_id} while this one published version "
                        f"{head.version}; only one trainer may run, stop one of them or give it another run.id"
                    ) from None
                break
        self.head = head

    def _head_is(self, value: bytes, deadline: float) -> bool:
        while True:
            try:
                entry = self._state.get(streams.HEAD_KEY).wait()
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise
            else:
                return entry is not None and entry.value == value

    def _expect_head(self) -> int | None:
        """Return the revision of the head we know; None before the first version."""
        entry = self._state.get(streams.HEAD_KEY).wait()
        if entry is None:
            return None
        if self.head is None or decode(entry.value, Head) != self.head:
            raise PublicationFailed(
                f"the head of run {self._run_id} is not the version this trainer published last; another trainer is "
                "at work, stop one of them or give it another run.id"
            )
        return entry.revision

    def _collect_garbage(self) -> None:
        with self._changed:
            pinned = set(self._pinned)
        surplus = sorted(self._stored - pinned)[: -self._keep_versions]
        if len(surplus) < _COLLECT_GARBAGE_AT:
            return
        doomed = [s.key for s in self._list_all() if blob_keys.version_of_weights(self._run_id, s.key) in set(surplus)]
        self._blobs.delete(doomed)
        self._stored -= set(surplus)

    def _list_all(self) -> list[BlobStat]:
        return list(self._blobs.list(blob_keys.all_weights_prefix(self._run_id)))
