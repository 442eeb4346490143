"""Where the model that a run's adapters sit upon is in the object store: found, stored once, or stored again when it is damaged."""

from __future__ import annotations

import structlog

from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import AnchorRef, ModelFile, VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publish_coordinator import Shares
from penstock.trainer.publishing.snapshot import Base
from penstock.trainer.publishing.version_writer import Label, VersionWriter, Written

log = structlog.get_logger("trainer.publish")


class PublishedBase:
    """The base of this life's adapters. Used by one thread."""

    def __init__(self, connections: Connections, writer: VersionWriter, shares: Shares) -> None:
        """Nothing is read before it is asked for."""
        self._run_id, self._blobs = connections.run_id, connections.blobs
        self._writer = writer
        self._shares = shares
        self._found: Written | None = None

    def find(self, base: Base, newest: Written | None) -> AnchorRef | None:
        """Return where a base is, given what the head names; None when it is not stored, or cannot be read."""
        if self._found is not None and self._found.manifest.state_root == base.root:
            return self._found.as_anchor
        for reference in _anchors_of(newest):
            if reference.state_root == base.root and (manifest := self._read(reference)) is not None:
                self._found = Written(manifest, reference.manifest)
                return self._found.as_anchor
        return None

    def lay(self, base: Base, label: Label, files: tuple[ModelFile, ...]) -> AnchorRef:
        """Store a base as an anchor under a number of its own, which no head names."""
        self._shares.hold(base.part)
        stored = self._shares.store_whole(base.part.taken, label.version)
        self._found = self._writer.whole(label, base.part.layout, files, stored, state_root=base.root, parent=None)
        return self._found.as_anchor

    def mended(self, base: Base, files: tuple[ModelFile, ...]) -> AnchorRef:
        """Return where the base that was found or laid is, stored again when an object of it is gone or altered."""
        assert self._found is not None
        manifest = self._found.manifest
        try:
            for reference in (self._found.reference, *manifest.references()):
                self._blobs.get(reference)
        except (BlobMissing, BlobCorrupt) as err:
            log.warning("the base of the adapters is damaged and is stored again", error=str(err))
            return self.lay(base, Label(PolicyVersion(manifest.version), manifest.step, manifest.epoch), files)
        return self._found.as_anchor

    def _read(self, reference: AnchorRef) -> VersionManifest | None:
        try:
            found = WeightReader(self._blobs, self._run_id).manifest(
                reference.manifest, PolicyVersion(reference.version)
            )
        except UNUSABLE as err:
            log.warning("the base that the head names cannot be read", error=str(err))
            return None
        return found if found.kind == "anchor" else None


def _anchors_of(newest: Written | None) -> list[AnchorRef]:
    """Return the anchors that a version names or is."""
    if newest is None:
        return []
    if newest.manifest.anchor is not None:
        return [newest.manifest.anchor]
    return [newest.as_anchor]
