"""The base of a run's adapters in the object store: found, stored once, or stored again if it is damaged."""

from __future__ import annotations

import structlog

from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import AnchorRef, ModelFile, VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publish_coordinator import PublishCoordinator
from penstock.trainer.publishing.snapshot import AdapterBase
from penstock.trainer.publishing.version_writer import Content, Label, VersionWriter, Written

log = structlog.get_logger("trainer.published_base")


class PublishedBase:
    """The base of this session's adapters. Used by one thread."""

    def __init__(self, connections: Connections, writer: VersionWriter, coordinator: PublishCoordinator) -> None:
        """Read nothing before the first call."""
        self._blobs = connections.blobs
        self._writer = writer
        self._coordinator = coordinator
        self._found: Written | None = None

    def find(self, base: AdapterBase, newest: Written | None) -> AnchorRef | None:
        """Return the stored full snapshot of a base, given the head's version; None if it is missing or unreadable."""
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
        self._found = self._writer.full_snapshot(label, content, parent=None)
        return self._found.as_anchor

    def repair(self, base: AdapterBase, files: tuple[ModelFile, ...]) -> AnchorRef:
        """Return the full snapshot that was found or stored, stored again if an object is missing or corrupt."""
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
    """Return the full snapshot that a version names or is."""
    if newest is None:
        return None
    return newest.manifest.anchor or newest.as_anchor
