"""Full snapshots written in the background of patches: decides when one is due, and writes it in its own thread.

No version waits for one. In manifests, settings and metrics a full snapshot is called an "anchor".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest import AnchorRef, VersionManifest
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.publishing.publish_coordinator import PublishCoordinator
from penstock.trainer.publishing.snapshot import ModelWeights, Snapshot
from penstock.trainer.publishing.version_writer import Content, Label, VersionWriter
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

snapshot_log = structlog.get_logger("trainer.full_snapshots")

_DENSE = 0.5  # a patch of this share of a full snapshot's size costs about as much as the full snapshot
# A larger share costs more: each worker decodes the patch and writes it twice, after the one before it; a full snapshot
# is written once, over the old bytes. Patches of float32 weights exceed this share, of bfloat16 stay far below.
_POINTLESS = 0.8


class FullSnapshots:
    """Tracks the newest full snapshot and the patches since, and writes the next one when it is due."""

    def __init__(self, writer: VersionWriter, coordinator: PublishCoordinator, policy: FullSnapshotPolicy) -> None:
        """Start without a full snapshot."""
        self._writer = writer
        self._coordinator = coordinator
        self._policy = policy
        self._newest: AnchorRef | None = None
        self._patches: list[tuple[PolicyVersion, int]] = []  # since the newest full snapshot: version, bytes
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.num_written = 0

    @property
    def newest(self) -> AnchorRef | None:
        """The newest complete full snapshot."""
        with self._lock:
            return self._newest

    def restart(self, newest: AnchorRef, patches: Iterable[VersionManifest] = ()) -> None:
        """Continue from a full snapshot and the patches that follow it; an older one than is known is not taken."""
        with self._lock:
            if self._newest is None or not is_newer(PolicyVersion(self._newest.version), PolicyVersion(newest.version)):
                self._newest = newest
            self._patches += [(PolicyVersion(m.version), m.num_bytes) for m in patches]
            self._forget_older_patches()

    def replaces_patch(self, patch_bytes: int) -> bool:
        """Return True if the next version should be a full snapshot instead of a patch of this size.

        It should if the patch is hardly smaller, or if it is not much smaller and a full snapshot is due.
        """
        with self._lock:
            if self._newest is None or patch_bytes <= _DENSE * self._newest.num_bytes:
                return False
            return patch_bytes > _POINTLESS * self._newest.num_bytes or self._is_due(extra=patch_bytes)

    def add_patch(self, version: PolicyVersion, patch: VersionManifest) -> bool:
        """Record a committed patch; return True if its weights should be retained for `write_retained`."""
        with self._lock:
            self._patches.append((version, patch.num_bytes))
            due = self._is_due()
        return due and (self._thread is None or not self._thread.is_alive())

    def write_retained(self, snapshot: Snapshot[ModelWeights], patch: VersionManifest) -> None:
        """Start to write the full snapshot of a version whose weights were retained."""
        self._thread = threading.Thread(target=self._write, args=(snapshot, patch), name="full-snapshot", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Wait for a full snapshot that is being written; nothing depends on one that is not finished."""
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _write(self, snapshot: Snapshot[ModelWeights], patch: VersionManifest) -> None:
        started = time.monotonic()
        try:
            stored = self._coordinator.store_retained(snapshot.version)
            written = self._writer.full_snapshot(
                Label(snapshot.version, snapshot.step, patch.epoch),
                Content(snapshot.weights.buckets.layout, patch.model_files, stored, patch.state_root),
                parent=patch.parent,
                point=CrashPoint.ANCHOR_STORED,
            )
        except PenstockError as err:
            snapshot_log.warning("full snapshot not written; trying again when the next one is due", error=str(err))
            return
        self.num_written += 1
        self.restart(written.as_anchor)
        snapshot_log.info(
            "full snapshot written",
            policy_version=snapshot.version,
            num_bytes=written.manifest.num_bytes,
            write_s=round(time.monotonic() - started, 3),
        )

    def _is_due(self, *, extra: int = 0) -> bool:
        assert self._newest is not None
        return self._policy.is_due(
            patch_bytes=sum(size for _, size in self._patches) + extra,
            full_bytes=self._newest.num_bytes,
            num_versions=len(self._patches) + (extra > 0),
        )

    def _forget_older_patches(self) -> None:
        newest = self._newest
        assert newest is not None
        self._patches = [p for p in self._patches if is_newer(p[0], PolicyVersion(newest.version))]
