"""Versions that are whole models: a patch of the version before, or a full snapshot, split over all ranks by buckets.

Full snapshots are written in the background of patches, and no version waits for one. In manifests, settings and metrics a full snapshot is
called an "anchor".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import AnchorRef, VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.rank_publisher import PatchSize, PublishCoordinator
from penstock.trainer.publishing.version_writer import Content, Label, StoredVersion, VersionWriter, Written
from penstock.trainer.publishing.weight_buckets import ModelWeights, Snapshot
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

snapshot_log = structlog.get_logger("trainer.full_snapshots")

_DENSE = 0.5  # a patch of this share of a full snapshot's size costs about as much as the full snapshot
# A larger share costs more: each worker decodes the patch and writes it twice, after the one before it; a full snapshot
# is written once, over the old bytes. Patches of float32 weights exceed this share, of bfloat16 stay far below.
_POINTLESS = 0.8
log = structlog.get_logger("trainer.model_versions")


class FullSnapshots:
    def __init__(self, writer: VersionWriter, coordinator: PublishCoordinator, policy: FullSnapshotPolicy) -> None:
        self._writer, self._coordinator, self._policy = writer, coordinator, policy
        self._newest: AnchorRef | None = None
        self._patches: list[tuple[PolicyVersion, int]] = []  # since the newest full snapshot: version, bytes
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.num_written = 0

    @property
    def newest(self) -> AnchorRef | None:
        with self._lock:
            return self._newest

    def restart(self, newest: AnchorRef, patches: Iterable[VersionManifest] = ()) -> None:
        """Continue from a full snapshot and the patches that follow it; an older one than is known is not taken."""
        with self._lock:
            if self._newest is None or not is_newer(PolicyVersion(self._newest.version), PolicyVersion(newest.version)):
                self._newest = newest
            floor = PolicyVersion(self._newest.version)
            self._patches += [(PolicyVersion(m.version), m.num_bytes) for m in patches]
            self._patches = [patch for patch in self._patches if is_newer(patch[0], floor)]

    def replaces_patch(self, patch_bytes: int) -> bool:
        """Return True if such a patch is hardly smaller than a full snapshot, or not much and one is due."""
        with self._lock:
            if self._newest is None or patch_bytes <= _DENSE * self._newest.num_bytes:
                return False
            return patch_bytes > _POINTLESS * self._newest.num_bytes or self._is_due(extra=patch_bytes)

    def add_patch(self, version: PolicyVersion, patch: VersionManifest) -> bool:
        with self._lock:
            self._patches.append((version, patch.num_bytes))
            due = self._is_due()
        return due and (self._thread is None or not self._thread.is_alive())

    def write_retained(self, snapshot: Snapshot[ModelWeights], patch: VersionManifest) -> None:
        self._thread = threading.Thread(target=self._write, args=(snapshot, patch), name="full-snapshot", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _write(self, snapshot: Snapshot[ModelWeights], patch: VersionManifest) -> None:
        started = time.monotonic()
        try:
            stored = self._coordinator.store_retained(snapshot.version)
            written = self._writer.write(
                "anchor",
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


class ModelVersions:
    """Stores whole models. Used by one thread."""

    def __init__(
        self, writer: VersionWriter, coordinator: PublishCoordinator, *, policy: FullSnapshotPolicy, epoch: int
    ) -> None:
        self._writer, self._coordinator, self._epoch = writer, coordinator, epoch
        self.full_snapshots = FullSnapshots(writer, coordinator, policy)
        self._layout: WeightLayout | None = None  # of the committed model, which every rank holds its buckets of
        self._was_read = False  # whether reading the head's model was tried
        self._dtype = ""  # of what was published or resumed last

    def resume(self, weights: ModelWeights, dtype: str, newest: Written) -> bool:
        buckets, manifest = weights.buckets, newest.manifest
        if weights.root() != manifest.state_root or buckets.layout.layout_id != manifest.layout_id:
            return False
        self._follow_chain(newest)
        self._coordinator.own.hold(buckets)
        self._coordinator.commit(buckets.copy_id, retain=False)
        self._layout, self._was_read, self._dtype = buckets.layout, True, dtype
        return True

    def store(self, snapshot: Snapshot[ModelWeights], newest: Written | None) -> StoredVersion:
        started = time.monotonic()
        layout, copy_id = snapshot.weights.buckets.layout, snapshot.weights.buckets.copy_id
        self._dtype = snapshot.dtype
        files = self._writer.small_files(snapshot.dtype)
        full_snapshot = self.full_snapshots.newest if self._holds(newest, layout) else None
        patch = None if full_snapshot is None else self._coordinator.compare(copy_id)
        root = self._coordinator.state_root(copy_id)
        diff_s = time.monotonic() - started
        if full_snapshot is None or patch is None or self.full_snapshots.replaces_patch(patch.num_bytes):
            kind, anchor, stored = "anchor", None, self._coordinator.store_whole(copy_id, snapshot.version)
        else:
            kind, anchor, stored = "patch", full_snapshot, self._coordinator.store_patch(copy_id, snapshot.version)
        label, content = Label(snapshot.version, snapshot.step, self._epoch), Content(layout, files, stored, root)
        parent = newest.as_ancestor if newest else None
        written = self._writer.write(kind, label, content, parent=parent, anchor=anchor)
        return StoredVersion(written, _density(patch, layout, written), layout.num_bytes, diff_s)

    def committed(self, snapshot: Snapshot[ModelWeights], written: Written) -> None:
        manifest = written.manifest
        is_due = manifest.kind == "patch" and self.full_snapshots.add_patch(snapshot.version, manifest)
        self._coordinator.commit(snapshot.weights.buckets.copy_id, retain=is_due)
        self._layout = snapshot.weights.buckets.layout
        if manifest.kind == "anchor":
            self.full_snapshots.restart(written.as_anchor)
        elif is_due:
            self.full_snapshots.write_retained(snapshot, manifest)

    def store_again(self, newest: Written) -> Written | None:
        """Store the newest version as a full snapshot; None if the ranks cannot read it either."""
        self._read_committed(newest)
        if self._layout is None:
            return None
        manifest = newest.manifest
        label = Label(PolicyVersion(manifest.version), manifest.step, self._epoch)
        files = self._writer.small_files(self._dtype, again=True) if self._dtype else manifest.model_files
        content = Content(self._layout, files, self._coordinator.store_whole(None, label.version), manifest.state_root)
        written = self._writer.write("anchor", label, content, parent=manifest.parent)
        self.full_snapshots.restart(written.as_anchor)
        return written

    def _holds(self, newest: Written | None, layout: WeightLayout) -> bool:
        if newest is None or newest.manifest.kind == "adapter":
            return False
        self._read_committed(newest)
        if self._layout is not None and self._layout.layout_id != layout.layout_id:
            log.warning(
                "the tensors' names, shapes or dtypes differ from the head's: publishing a full snapshot",
                layout=layout.layout_id,
                head_layout=self._layout.layout_id,
            )
            return False
        return self._layout is not None

    def _read_committed(self, newest: Written) -> None:
        if self._layout is not None or self._was_read:
            return
        self._was_read = True
        if not self._follow_chain(newest):
            return
        version = PolicyVersion(newest.manifest.version)
        try:
            layout = self._writer.reader().layout(newest.manifest)
            root = self._coordinator.read_head(newest.reference, version)
        except (*UNUSABLE, PublicationFailed) as err:
            log.warning("the head's weights are unreadable: publishing a full snapshot", error=str(err))
            return
        if root != newest.manifest.state_root:
            log.warning(
                "the head's weights do not match its manifest: publishing a full snapshot",
                root=root,
                expected=newest.manifest.state_root,
            )
            return
        self._layout = layout
        log.info("read the head's weights", policy_version=version)

    def _follow_chain(self, newest: Written) -> bool:
        manifest = newest.manifest
        try:
            chain = self._writer.reader().plan(manifest, None)
        except UNUSABLE as err:
            log.warning("the head's chain is unreadable: publishing a full snapshot", error=str(err))
            return False
        self.full_snapshots.restart(manifest.anchor or newest.as_anchor, chain.patches)
        return True


def _density(patch: PatchSize | None, layout: WeightLayout, written: Written) -> float:
    if patch is None:
        return written.manifest.density
    return patch.num_changed / max(layout.num_words, 1)
