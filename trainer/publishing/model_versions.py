"""Versions that are whole models: a patch of the version before, or a full snapshot, split over all ranks by buckets."""

from __future__ import annotations

import time

import structlog

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import AnchorRef, ModelFile
from penstock.protocol.weights.version_reader import UNUSABLE
from penstock.trainer.connections import Connections
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.full_snapshots import FullSnapshots
from penstock.trainer.publishing.publish_coordinator import PublishCoordinator
from penstock.trainer.publishing.rank_publisher import PatchSize
from penstock.trainer.publishing.snapshot import AdapterBase, ModelWeights, Snapshot
from penstock.trainer.publishing.version_kind import StoredVersion
from penstock.trainer.publishing.version_writer import Content, Label, VersionWriter, Written
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

log = structlog.get_logger("trainer.model_versions")


class ModelVersions:
    """Stores whole models; implements `VersionKind`. Used by one thread, except `hold`."""

    def __init__(
        self,
        connections: Connections,
        writer: VersionWriter,
        coordinator: PublishCoordinator,
        *,
        policy: FullSnapshotPolicy,
        epoch: int,
    ) -> None:
        """``policy`` says when a full snapshot is due."""
        self._writer = writer
        self._coordinator = coordinator
        self._epoch = epoch
        self.full_snapshots = FullSnapshots(writer, coordinator, policy)
        self._layout: WeightLayout | None = None  # of the committed model, which every rank holds its buckets of
        self._was_read = False  # whether reading the head's model was tried
        self._dtype = ""  # of what was published or resumed last

    def hold(self, snapshot: Snapshot[ModelWeights]) -> None:
        """Hold rank 0's buckets; the other ranks hold theirs since they copied them."""
        self._coordinator.hold(snapshot.weights.buckets)

    def resume(self, weights: ModelWeights, dtype: str, newest: Written) -> bool:
        """Return True if this model equals the newest version's bit for bit; the next version is then a patch of it."""
        buckets, manifest = weights.buckets, newest.manifest
        if weights.root() != manifest.state_root or buckets.layout.layout_id != manifest.layout_id:
            return False
        self._follow_chain(newest)
        self._coordinator.hold(buckets)
        self._coordinator.commit(buckets.copy_id, retain=False)
        self._layout, self._was_read, self._dtype = buckets.layout, True, dtype
        return True

    def missing_base(self, weights: ModelWeights, newest: Written | None) -> AdapterBase | None:
        """Return None: a model needs no base."""
        return None

    def store(self, snapshot: Snapshot[ModelWeights], newest: Written | None) -> StoredVersion:
        """Store a patch of the newest version, or a full snapshot if there is nothing to compare with or no gain."""
        started = time.monotonic()
        layout, copy_id = snapshot.weights.buckets.layout, snapshot.weights.buckets.copy_id
        self._dtype = snapshot.dtype
        files = self._writer.small_files(snapshot.dtype)
        full_snapshot = self.full_snapshots.newest if self._holds(newest, layout) else None
        patch = None if full_snapshot is None else self._coordinator.compare(copy_id)
        root = self._coordinator.state_root(copy_id)
        diff_s = time.monotonic() - started
        if full_snapshot is None or patch is None or self.full_snapshots.replaces_patch(patch.num_bytes):
            written = self._store_full(snapshot, files, root, newest)
        else:
            assert newest is not None
            written = self._store_patch(snapshot, files, root, newest, full_snapshot)
        return StoredVersion(written, _density(patch, layout, written), layout.num_bytes, diff_s)

    def committed(self, snapshot: Snapshot[ModelWeights], written: Written) -> None:
        """Have every rank take the version as the committed one; start a full snapshot of it if one is due."""
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
        content = Content(self._layout, files, self._coordinator.store_committed(label.version), manifest.state_root)
        written = self._writer.full_snapshot(label, content, parent=manifest.parent)
        self.full_snapshots.restart(written.as_anchor)
        return written

    def close(self, deadline_s: float) -> None:
        """Wait for a full snapshot that is being written in the background."""
        self.full_snapshots.close(deadline_s)

    def _store_full(
        self,
        snapshot: Snapshot[ModelWeights],
        files: tuple[ModelFile, ...],
        root: str,
        newest: Written | None,
    ) -> Written:
        buckets = snapshot.weights.buckets
        stored = self._coordinator.store_whole(buckets.copy_id, snapshot.version)
        content = Content(buckets.layout, files, stored, root)
        return self._writer.full_snapshot(self._label(snapshot), content, parent=newest.as_ancestor if newest else None)

    def _store_patch(
        self,
        snapshot: Snapshot[ModelWeights],
        files: tuple[ModelFile, ...],
        root: str,
        newest: Written,
        full_snapshot: AnchorRef,
    ) -> Written:
        buckets = snapshot.weights.buckets
        stored = self._coordinator.store_patch(buckets.copy_id, snapshot.version)
        content = Content(buckets.layout, files, stored, root)
        return self._writer.patch(
            self._label(snapshot), content, parent=newest.as_ancestor, full_snapshot=full_snapshot
        )

    def _label(self, snapshot: Snapshot[ModelWeights]) -> Label:
        return Label(snapshot.version, snapshot.step, self._epoch)

    def _holds(self, newest: Written | None, layout: WeightLayout) -> bool:
        """Return True if the ranks hold the newest version in this layout, reading it from the store if needed."""
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
        """Have the ranks read the newest version, once in a session that has not published it."""
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
        """Read the patches between the newest version and its full snapshot; returns False if they are unreadable."""
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
