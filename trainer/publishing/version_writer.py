"""Makes a version of what the ranks have stored: writes its manifest last, then checks the store's listing.

Every attempt has its own keys, so nothing is ever overwritten and a crash leaves only objects that
no head leads to.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.facts import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, ModelFile, VersionManifest
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.model_folder import small_files
from penstock.trainer.publishing.rank_publisher import StoredObjects
from penstock.trainer.publishing.weight_buckets import AdapterBase, AdapterWeights, ModelWeights, Snapshot

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey  # its library is imported where a key is configured


@dataclass(frozen=True, slots=True)
class Written:
    """A complete version in the object store, not announced yet."""

    manifest: VersionManifest
    reference: BlobRef

    @property
    def as_ancestor(self) -> Ancestor:
        m = self.manifest
        return Ancestor(version=m.version, manifest=self.reference, state_root=m.state_root)

    @property
    def as_anchor(self) -> AnchorRef:
        m = self.manifest
        return AnchorRef(version=m.version, manifest=self.reference, state_root=m.state_root, num_bytes=m.num_bytes)


@dataclass(frozen=True, slots=True)
class Label:
    version: PolicyVersion
    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Content:
    layout: WeightLayout
    files: tuple[ModelFile, ...]
    stored: StoredObjects
    state_root: str


class VersionWriter:
    def __init__(self, connections: Connections, model_folder: Path, signing_key: SigningKey | None = None) -> None:
        self._run_id, self._blobs = connections.run_id, connections.blobs
        self._model_folder = model_folder
        self._signing_key = signing_key
        self._small: dict[str, tuple[ModelFile, ...]] = {}  # by dtype
        self._layouts: dict[str, BlobRef] = {}

    def reader(self) -> WeightReader:
        """Return a reader of the run's versions; with a signing key it reads none that the key has not signed.

        So the first version after a key was set or changed is a full snapshot: no signed version builds on an unsigned one.
        """
        trusted_keys = None if self._signing_key is None else self._signing_key.trusted
        return WeightReader(self._blobs, self._run_id, trusted_keys=trusted_keys)

    def write(
        self,
        kind: Literal["anchor", "patch", "adapter"],  # "anchor" is the manifest's word for a full snapshot
        label: Label,
        content: Content,
        *,
        parent: Ancestor | None,
        anchor: AnchorRef | None = None,
        point: CrashPoint = CrashPoint.SHARDS_STORED,
    ) -> Written:
        """Write the manifest of what is stored, and compare its objects with the store's listing; raises PublicationFailed.

        The objects of a full snapshot are whole buckets; those of a patch hold what changed since its ``parent``, and those of an
        adapter its one bucket. ``anchor`` is the full snapshot that a patch or an adapter needs.
        """
        crash_points.reach(point)
        manifest = VersionManifest(
            kind=kind,
            run_id=self._run_id,
            version=label.version,
            step=label.step,
            epoch=label.epoch,
            parent=parent,
            anchor=anchor,
            layout=self._layout(content.layout),
            objects=content.stored.objects,
            buckets=content.stored.buckets,
            state_root=content.state_root,
            model_files=content.files,
        )
        key = blob_keys.weights_manifest(self._run_id, label.version, content.stored.attempt)
        data = manifest.to_json()
        reference = self._blobs.put(key, data if self._signing_key is None else self._signing_key.sign(data))
        stored = {s.key: s.size_bytes for s in self._blobs.list(blob_keys.weights_prefix(self._run_id, label.version))}
        for blob in (*manifest.objects, reference):
            if stored.get(blob.key) != blob.size_bytes:
                raise PublicationFailed(
                    f"{blob.key}: stored {blob.size_bytes} bytes, the object store lists "
                    f"{stored.get(blob.key, 'no such object')}; version {label.version} is not announced; "
                    "check that the object store lists what it has acknowledged"
                )
        return Written(manifest, reference)

    def _layout(self, layout: WeightLayout) -> BlobRef:
        data = layout.to_json()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._layouts:
            self._layouts[digest] = self._put_once(blob_keys.weights_layout(self._run_id, digest), data)
        return self._layouts[digest]

    def small_files(self, dtype: str, *, again: bool = False) -> tuple[ModelFile, ...]:
        """Return config and tokenizer for weights of a dtype, stored if missing; ``again`` checks the store once more."""
        if again or dtype not in self._small:
            found = small_files(self._model_folder, dtype)
            self._small[dtype] = tuple(self._small_file(name, data) for name, data in found.items())
        return self._small[dtype]

    def adapter_files(self, config: bytes) -> tuple[ModelFile, ...]:
        return (self._small_file(ADAPTER_CONFIG, config),)

    def _small_file(self, name: str, data: bytes) -> ModelFile:
        key = blob_keys.model_file(self._run_id, hashlib.sha256(data).hexdigest(), name)
        return ModelFile(name=name, blob=self._put_once(key, data))

    def _put_once(self, key: str, data: bytes) -> BlobRef:
        """Store an object whose key is derived from its content, unless it is intact; a damaged one is not overwritten."""
        reference = BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        try:
            self._blobs.get(reference)
        except BlobMissing:
            return self._blobs.put(key, data)
        except BlobCorrupt:
            folder, _, name = key.rpartition("/")
            return self._blobs.put(f"{folder}/{secrets.token_hex(4)}/{name}", data)
        return reference


W = TypeVar("W", ModelWeights, AdapterWeights)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    written: Written
    density: float  # share of the values whose bits changed since the parent
    raw_bytes: int  # of the whole model
    diff_s: float  # compare and encode; wall-clock time


class VersionKind(Protocol[W]):
    """Stores versions of one kind; ``newest`` is always the version that the head names."""

    def hold(self, snapshot: Snapshot[W]) -> None:
        """Hold on this rank what a later `store` needs. Called on the training thread."""
        ...

    def resume(self, weights: W, dtype: str, newest: Written) -> bool:
        """Return True if these weights equal the newest version's bit for bit; the next version then follows on it."""
        ...

    def missing_base(self, weights: W, newest: Written | None) -> AdapterBase | None:
        """Return the base that these weights need and that is not stored; None if nothing is missing."""
        ...

    def store(self, snapshot: Snapshot[W], newest: Written | None) -> StoredVersion:
        """Store the objects of a version, then its manifest; nothing refers to it yet."""
        ...

    def committed(self, snapshot: Snapshot[W], written: Written) -> None:
        """Update state after the head was moved to a snapshot's version."""
        ...

    def store_again(self, newest: Written) -> Written | None:
        """Store the newest version again under its own number; None if its weights are not at hand."""
        ...

    def close(self, deadline_s: float) -> None:
        """Wait for what is being stored in the background."""
        ...
