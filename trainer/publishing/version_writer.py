"""Makes a version of what the ranks have stored: the manifest, written last, then a look at the listing.

Every attempt has keys of its own, so nothing is ever overwritten and a crash leaves only objects that
no head leads to.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.facts import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, ModelFile, VersionManifest
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.model_folder import small_files
from penstock.trainer.publishing.publish_coordinator import Assembled


@dataclass(frozen=True, slots=True)
class Written:
    """A complete version in the object store, which nobody has been told of."""

    manifest: VersionManifest
    reference: BlobRef

    @property
    def as_ancestor(self) -> Ancestor:
        """What the next version says of it."""
        m = self.manifest
        return Ancestor(version=m.version, manifest=self.reference, state_root=m.state_root)

    @property
    def as_anchor(self) -> AnchorRef:
        """What the patches that build on it say of it."""
        m = self.manifest
        return AnchorRef(version=m.version, manifest=self.reference, state_root=m.state_root, num_bytes=m.num_bytes)


@dataclass(frozen=True, slots=True)
class Label:
    """Which version this is."""

    version: PolicyVersion
    step: int
    epoch: int


class VersionWriter:
    """Stores versions of one run; thread-safe."""

    def __init__(self, connections: Connections, model_folder: Path) -> None:
        """Config and tokenizer come from ``model_folder``."""
        self._run_id, self._blobs = connections.run_id, connections.blobs
        self._model_folder = model_folder
        self._small: dict[str, tuple[ModelFile, ...]] = {}  # by dtype
        self._layouts: dict[str, BlobRef] = {}

    def patch(
        self,
        label: Label,
        layout: WeightLayout,
        files: tuple[ModelFile, ...],
        stored: Assembled,
        *,
        state_root: str,
        parent: Ancestor,
        anchor: AnchorRef,
    ) -> Written:
        """Make a version of what changed since its parent, which is stored already."""
        crash_points.reach(CrashPoint.SHARDS_STORED)
        manifest = VersionManifest(
            kind="patch",
            run_id=self._run_id,
            version=label.version,
            step=label.step,
            epoch=label.epoch,
            parent=parent,
            anchor=anchor,
            layout=self._layout(layout),
            objects=stored.objects,
            buckets=stored.buckets,
            state_root=state_root,
            model_files=files,
        )
        return self._finish(manifest, stored.attempt)

    def whole(
        self,
        label: Label,
        layout: WeightLayout,
        files: tuple[ModelFile, ...],
        stored: Assembled,
        *,
        state_root: str,
        parent: Ancestor | None,
        base: AnchorRef | None = None,
        point: CrashPoint = CrashPoint.SHARDS_STORED,
    ) -> Written:
        """Make a version of whole buckets, which are stored already.

        It is an anchor, or with a ``base`` the adapter of one bucket that sits upon it.
        """
        crash_points.reach(point)
        manifest = VersionManifest(
            kind="adapter" if base else "anchor",
            run_id=self._run_id,
            version=label.version,
            step=label.step,
            epoch=label.epoch,
            parent=parent,
            anchor=base,
            layout=self._layout(layout),
            objects=stored.objects,
            buckets=stored.buckets,
            state_root=state_root,
            model_files=files,
        )
        return self._finish(manifest, stored.attempt)

    def _finish(self, manifest: VersionManifest, attempt: str) -> Written:
        version = PolicyVersion(manifest.version)
        key = blob_keys.weights_manifest(self._run_id, version, attempt)
        reference = self._blobs.put(key, manifest.to_json())
        stored = {s.key: s.size_bytes for s in self._blobs.list(blob_keys.weights_prefix(self._run_id, version))}
        for blob in (*manifest.objects, reference):
            if stored.get(blob.key) != blob.size_bytes:
                raise PublicationFailed(
                    f"{blob.key}: stored {blob.size_bytes} bytes, the object store lists "
                    f"{stored.get(blob.key, 'no such object')}; version {version} is not announced"
                )
        return Written(manifest, reference)

    def _layout(self, layout: WeightLayout) -> BlobRef:
        data = layout.to_json()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._layouts:
            self._layouts[digest] = self._put_once(blob_keys.weights_layout(self._run_id, digest), data)
        return self._layouts[digest]

    def small_files(self, dtype: str, *, again: bool = False) -> tuple[ModelFile, ...]:
        """Store config and tokenizer for weights of a dtype, and return where they are; ``again``: look once more."""
        if again or dtype not in self._small:
            found = small_files(self._model_folder, dtype)
            self._small[dtype] = tuple(self._small_file(name, data) for name, data in found.items())
        return self._small[dtype]

    def adapter_files(self, config: bytes) -> tuple[ModelFile, ...]:
        """Store how an adapter counts, and return where that is."""
        return (self._small_file(ADAPTER_CONFIG, config),)

    def _small_file(self, name: str, data: bytes) -> ModelFile:
        key = blob_keys.model_file(self._run_id, hashlib.sha256(data).hexdigest(), name)
        return ModelFile(name=name, blob=self._put_once(key, data))

    def _put_once(self, key: str, data: bytes) -> BlobRef:
        """Store an object whose key is made of its content, unless it is there whole; a damaged one is left alone."""
        reference = BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        try:
            self._blobs.get(reference)
        except BlobMissing:
            return self._blobs.put(key, data)
        except BlobCorrupt:
            folder, _, name = key.rpartition("/")
            return self._blobs.put(f"{folder}/{secrets.token_hex(4)}/{name}", data)
        return reference
