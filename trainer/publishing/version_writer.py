"""Makes a version of what the ranks have stored: writes its manifest last, then checks the store's listing.

Every attempt has separate keys, so nothing is ever overwritten and a crash leaves only objects that
no head leads to.

An adapter is stored by rank 0: its small factors whole, applied to a base that is stored once.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.files import target_outside
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import SMALL_FILE, Ancestor, AnchorRef, ModelFile, VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed, UnsupportedModel
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher, StoredObjects
from penstock.trainer.publishing.weight_buckets import AdapterBase, AdapterWeights, Snapshot

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey  # its library is imported where a key is configured

log = structlog.get_logger("trainer.published_base")

_MAX_SMALL_FILE_BYTES = 64 * 1024**2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Written:
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
        self._model_folder, self._signing_key = model_folder, signing_key
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
            kind=kind, run_id=self._run_id, version=label.version, step=label.step, epoch=label.epoch, parent=parent, anchor=anchor,
            layout=self._layout(content.layout), objects=content.stored.objects, buckets=content.stored.buckets,
            state_root=content.state_root, model_files=content.files,
        )  # fmt: skip
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
        if again or dtype not in self._small:
            files = small_files(self._model_folder, dtype)
            self._small[dtype] = tuple(self.small_file(name, data) for name, data in files.items())
        return self._small[dtype]

    def small_file(self, name: str, data: bytes) -> ModelFile:
        key = blob_keys.model_file(self._run_id, hashlib.sha256(data).hexdigest(), name)
        return ModelFile(name=name, blob=self._put_once(key, data))

    def _put_once(self, key: str, data: bytes) -> BlobRef:
        """Store an object whose key is derived from its content, unless it is intact; a damaged one is not overwritten."""
        reference = BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        try:
            self._blobs.get(reference, is_expected=False)
        except BlobMissing:
            return self._blobs.put(key, data)
        except BlobCorrupt:
            folder, _, name = key.rpartition("/")
            return self._blobs.put(f"{folder}/{secrets.token_hex(4)}/{name}", data)
        return reference


@dataclass(frozen=True, slots=True)
class StoredVersion:
    written: Written
    density: float  # share of the values whose bits changed since the parent
    raw_bytes: int  # of the whole model
    diff_s: float  # compare and encode; wall-clock time


class AdapterVersions:
    """Stores adapters, and once their base, as a full snapshot under a number that no head names. Used by one thread."""

    def __init__(
        self, connections: Connections, writer: VersionWriter, coordinator: PublishCoordinator, *, epoch: int
    ) -> None:
        self._blobs, self._writer, self._epoch = connections.blobs, writer, epoch
        self._coordinator = coordinator  # of the base, whose buckets are on all ranks
        self._alone = PublishCoordinator(RankPublisher(connections.blobs, connections.run_id))
        self._base: Written | None = None  # of this session's adapters
        self._newest: Snapshot[AdapterWeights] | None = None  # the head's version, if it is an adapter

    def resume(self, weights: AdapterWeights, dtype: str, newest: Written) -> bool:
        """Return True if these weights equal the head's bit for bit, and their base is stored."""
        manifest = newest.manifest
        if manifest.state_root != weights.root() or self.find_base(weights.base, newest) is None:
            return False
        self._newest = Snapshot(PolicyVersion(manifest.version), manifest.step, weights, dtype)
        return True

    def find_base(self, base: AdapterBase, newest: Written | None) -> AnchorRef | None:
        if self._base is not None and self._base.manifest.state_root == base.root:
            return self._base.as_anchor
        if newest is None:
            return None
        reference = newest.manifest.anchor or newest.as_anchor
        if reference.state_root != base.root:
            return None
        try:
            manifest = self._writer.reader().manifest(reference.manifest, PolicyVersion(reference.version))
        except UNUSABLE as err:
            log.warning("the base of the head's version is unreadable", error=str(err))
            return None
        if manifest.kind != "anchor":
            return None
        self._base = Written(manifest, reference.manifest)
        return self._base.as_anchor

    def store_base(self, base: AdapterBase, label: Label, files: tuple[ModelFile, ...]) -> AnchorRef:
        self._coordinator.own.hold(base.buckets)
        stored = self._coordinator.store_whole(base.buckets.copy_id, label.version)
        content = Content(base.buckets.layout, files, stored, base.root)
        self._base = self._writer.write("anchor", label, content, parent=None)
        return self._base.as_anchor

    def store(self, snapshot: Snapshot[AdapterWeights], newest: Written | None) -> StoredVersion:
        base = snapshot.weights.base
        reference = self.find_base(base, newest)
        if reference is None:
            raise PublicationFailed(
                f"version {snapshot.version} is an adapter, and its base {base.root[:16]}… is not published; "
                "start the trainer again: it stores the base first"
            )
        written = self._write(snapshot, reference, newest.as_ancestor if newest else None)
        return StoredVersion(written, written.manifest.density, base.buckets.layout.num_bytes, diff_s=0.0)

    def committed(self, snapshot: Snapshot[AdapterWeights], written: Written) -> None:
        del written
        self._newest = snapshot

    def store_again(self, newest: Written) -> Written | None:
        """Store the newest version again, and a damaged base; None if its weights are not at hand."""
        adapter = self._newest
        if adapter is None or adapter.version != newest.manifest.version:
            return None
        assert self._base is not None
        files, base, manifest = self._writer.small_files(adapter.dtype, again=True), self._base, self._base.manifest
        anchor = base.as_anchor
        try:
            for reference in (base.reference, *manifest.references()):
                self._blobs.get(reference)
        except (BlobMissing, BlobCorrupt) as err:
            log.warning("the adapters' base is damaged; storing it again", error=str(err))
            label = Label(PolicyVersion(manifest.version), manifest.step, manifest.epoch)
            anchor = self.store_base(adapter.weights.base, label, files)
        return self._write(adapter, anchor, newest.manifest.parent)

    def _write(self, snapshot: Snapshot[AdapterWeights], base: AnchorRef, parent: Ancestor | None) -> Written:
        weights = snapshot.weights
        self._alone.own.hold(weights.buckets)
        try:
            stored = self._alone.store_whole(weights.buckets.copy_id, snapshot.version, file_name=ADAPTER_WEIGHTS)
        finally:
            self._alone.own.discard(())
        files = (self._writer.small_file(ADAPTER_CONFIG, weights.base.config.to_json()),)
        return self._writer.write(
            "adapter",
            Label(snapshot.version, snapshot.step, self._epoch),
            Content(weights.buckets.layout, files, stored, weights.root()),
            parent=parent,
            anchor=base,
        )


def small_files(model_folder: Path, dtype: str, changed: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files of a model folder besides its weights that a manifest may name: config, tokenizer, templates.

    ``config.json`` gets the ``dtype`` of the new weights, and what else has ``changed``. Raises UnsupportedModel for a link out of the folder: what it
    links to would be published.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(model_folder.iterdir())
        if path.is_file()
        and _NAME.fullmatch(path.name)
        and SMALL_FILE.fullmatch(path.name)
        and path.stat().st_size <= _MAX_SMALL_FILE_BYTES
        and _is_own(path)
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype, **(changed or {})}
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def _is_own(path: Path) -> bool:
    if (target := target_outside(path, path.parent)) is None:
        return True
    raise UnsupportedModel(
        f"{path} links to {target}, outside of the model folder, and would be published with the model; copy the file there, "
        "or remove the link"
    )
