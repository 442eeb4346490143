"""Versions that are adapters: rank 0 stores the small factors whole, applied to a base that is stored once."""

from __future__ import annotations

import structlog

from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_WEIGHTS
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, ModelFile, VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE
from penstock.trainer.connections import Connections
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.version_writer import Content, Label, StoredVersion, VersionWriter, Written
from penstock.trainer.publishing.weight_buckets import AdapterBase, AdapterWeights, Snapshot

log = structlog.get_logger("trainer.published_base")


class PublishedBase:
    """The base of this session's adapters. Used by one thread."""

    def __init__(self, connections: Connections, writer: VersionWriter, coordinator: PublishCoordinator) -> None:
        self._blobs = connections.blobs
        self._writer = writer
        self._coordinator = coordinator
        self._found: Written | None = None

    def find(self, base: AdapterBase, newest: Written | None) -> AnchorRef | None:
        if self._found is not None and self._found.manifest.state_root == base.root:
            return self._found.as_anchor
        reference = _base_of(newest)
        if reference is not None and reference.state_root == base.root and (manifest := self._read(reference)):
            self._found = Written(manifest, reference.manifest)
            return self._found.as_anchor
        return None

    def store(self, base: AdapterBase, label: Label, files: tuple[ModelFile, ...]) -> AnchorRef:
        """Store a base as a full snapshot under a version number of its own, which no head names."""
        self._coordinator.hold(base.buckets)
        stored = self._coordinator.store_whole(base.buckets.copy_id, label.version)
        content = Content(base.buckets.layout, files, stored, base.root)
        self._found = self._writer.write("anchor", label, content, parent=None)
        return self._found.as_anchor

    def repair(self, base: AdapterBase, files: tuple[ModelFile, ...]) -> AnchorRef:
        assert self._found is not None
        manifest = self._found.manifest
        try:
            for reference in (self._found.reference, *manifest.references()):
                self._blobs.get(reference)
        except (BlobMissing, BlobCorrupt) as err:
            log.warning("the adapters' base is damaged; storing it again", error=str(err))
            return self.store(base, Label(PolicyVersion(manifest.version), manifest.step, manifest.epoch), files)
        return self._found.as_anchor

    def _read(self, reference: AnchorRef) -> VersionManifest | None:
        try:
            found = self._writer.reader().manifest(reference.manifest, PolicyVersion(reference.version))
        except UNUSABLE as err:
            log.warning("the base of the head's version is unreadable", error=str(err))
            return None
        return found if found.kind == "anchor" else None


def _base_of(newest: Written | None) -> AnchorRef | None:
    if newest is None:
        return None
    return newest.manifest.anchor or newest.as_anchor


class AdapterVersions:
    """Stores adapters; implements `VersionKind`. Used by one thread, except `hold`."""

    def __init__(
        self, connections: Connections, writer: VersionWriter, coordinator: PublishCoordinator, *, epoch: int
    ) -> None:
        """``coordinator`` stores the base, which is split over all ranks."""
        self._writer = writer
        self._epoch = epoch
        self._alone = PublishCoordinator(RankPublisher(connections.blobs, connections.run_id))
        self._base = PublishedBase(connections, writer, coordinator)
        self._newest: Snapshot[AdapterWeights] | None = None  # the head's version, if it is an adapter

    def hold(self, snapshot: Snapshot[AdapterWeights]) -> None:
        """Hold nothing: the snapshot has all of the adapter."""

    def resume(self, weights: AdapterWeights, dtype: str, newest: Written) -> bool:
        manifest = newest.manifest
        if manifest.state_root != weights.root() or self._base.find(weights.base, newest) is None:
            return False
        self._newest = Snapshot(PolicyVersion(manifest.version), manifest.step, weights, dtype)
        return True

    def missing_base(self, weights: AdapterWeights, newest: Written | None) -> AdapterBase | None:
        return weights.base if self._base.find(weights.base, newest) is None else None

    def store_base(self, base: AdapterBase, label: Label, dtype: str) -> None:
        self._base.store(base, label, self._writer.small_files(dtype))

    def store(self, snapshot: Snapshot[AdapterWeights], newest: Written | None) -> StoredVersion:
        base = snapshot.weights.base
        reference = self._base.find(base, newest)
        if reference is None:
            raise PublicationFailed(
                f"version {snapshot.version} is an adapter, and its base {base.root[:16]}… is not published; "
                "start the trainer again: it stores the base first"
            )
        written = self._write(snapshot, reference, newest.as_ancestor if newest else None)
        return StoredVersion(written, written.manifest.density, base.buckets.layout.num_bytes, diff_s=0.0)

    def committed(self, snapshot: Snapshot[AdapterWeights], written: Written) -> None:
        self._newest = snapshot

    def store_again(self, newest: Written) -> Written | None:
        adapter = self._newest
        if adapter is None or adapter.version != newest.manifest.version:
            return None
        files = self._writer.small_files(adapter.dtype, again=True)
        return self._write(adapter, self._base.repair(adapter.weights.base, files), newest.manifest.parent)

    def close(self, deadline_s: float) -> None:
        """Return at once: nothing is stored in the background."""

    def _write(self, snapshot: Snapshot[AdapterWeights], base: AnchorRef, parent: Ancestor | None) -> Written:
        weights = snapshot.weights
        self._alone.hold(weights.buckets)
        try:
            stored = self._alone.store_whole(weights.buckets.copy_id, snapshot.version, file_name=ADAPTER_WEIGHTS)
        finally:
            self._alone.discard(())
        files = self._writer.adapter_files(weights.base.config.to_json())
        return self._writer.write(
            "adapter",
            Label(snapshot.version, snapshot.step, self._epoch),
            Content(weights.buckets.layout, files, stored, weights.root()),
            parent=parent,
            anchor=base,
        )
