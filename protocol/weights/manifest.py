"""The manifest of a published version: written last, with every object and its hash.

A version is a full snapshot (every bucket whole; its stored kind and field are called ``anchor``), a *patch* of its
parent, or an *adapter*: low-rank factors, whole, for a full snapshot that is its base. `layout` defines buckets,
`bucket_codec` encodes their changes, `manifest_chain` orders manifests, `adapter_format` has an adapter's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from penstock.protocol.errors import MalformedFact
from penstock.protocol.groups import BlobRef, Count, Identifier, Sha256, Wire, first_problem
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, adapter_digest
from penstock.protocol.weights.bucket_codec import Codec
from penstock.protocol.weights.layout import TensorDigest, weights_digest

MAX_MANIFEST_BYTES = 64 * 1024**2
SIGNATURE_LINE = re.compile(rb"ed25519 ([0-9a-f]{16}) ([A-Za-z0-9+/]{86}==)")  # key and signature, see `signature`
# What a model folder needs besides weights; anything else could be read as weights, or as code by some engine.
SMALL_FILE = re.compile(
    r"(?!.*\.index\.json$).*\.(json|jsonl|jinja|txt|model|tiktoken|vocab|bpe|md|rst|ya?ml|csv|png|jpe?g|gif|svg|pdf)"
    r"|[^.]+",
    re.IGNORECASE,
)
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ModelFile(Wire):
    """One file of a Hugging Face model folder and the object that holds it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # no slash: it becomes a file name
    blob: BlobRef


class StoredRange(Wire):
    """Bytes ``[offset, offset + size_bytes)`` of the manifest's object number ``object``, with their sha256."""

    object: Count
    offset: Count
    size_bytes: Count
    sha256: Sha256


class BucketState(Wire):
    """One bucket of a version: how its change is stored, and what it is before and after."""

    codec: Codec
    stored: StoredRange | None = None  # None exactly for `none`
    num_words: Count
    num_changed: Count  # words; of what is stored whole: all
    base_xxh3: Xxh3 | None = None  # of the raw bucket in the parent; None of what is stored whole
    new_xxh3: Xxh3  # of the raw bucket in this version

    @model_validator(mode="after")
    def _consistent(self) -> BucketState:
        if (self.stored is None) != (self.codec == "none"):
            raise ValueError(f"codec {self.codec} {'needs' if self.stored is None else 'has no'} stored bytes")
        if self.num_changed > self.num_words:
            raise ValueError(f"{self.num_changed} of {self.num_words} words changed")
        if (self.base_xxh3 is None) != (self.codec == "safetensors"):
            raise ValueError(f"codec {self.codec}: a patch has a base, what is whole has none")
        if self.codec == "none" and (self.num_changed or self.base_xxh3 != self.new_xxh3):
            raise ValueError("codec none: base_xxh3 and new_xxh3 must be equal and no word changed")
        return self


class Ancestor(Wire):
    """Another version that this one builds on, with the ``state_root`` it must have."""

    version: Count
    manifest: BlobRef
    state_root: Sha256


class AnchorRef(Ancestor):
    """A full snapshot that a version needs; ``num_bytes`` of all its objects.

    For a patch the newest one when it was published, for an adapter its base model.
    """

    num_bytes: Count


class VersionManifest(Wire):
    """One complete version: a full snapshot, a patch of its parent, or an adapter of a full snapshot.

    A version may have two manifests: a patch when it is published, and a full snapshot written later. Their
    ``state_root`` is equal, and the chain continues from the patch. An adapter's buckets are its factors.
    """

    schema_tag: Literal["weights_manifest.v2"] = "weights_manifest.v2"
    kind: Literal["anchor", "patch", "adapter"]
    run_id: Identifier
    version: Count
    step: Count
    epoch: Count  # of the trainer's lease: a later trainer's is higher
    parent: Ancestor | None = None  # None only in versions that are whole
    anchor: AnchorRef | None = None  # None exactly in a full snapshot
    layout: BlobRef  # its sha256 is the layout id
    objects: tuple[BlobRef, ...]
    buckets: tuple[BucketState, ...]  # as many as the layout has, in its order
    state_root: Sha256  # of the weights that are served, see `root_of`
    model_files: tuple[ModelFile, ...] = ()

    @property
    def layout_id(self) -> str:
        return self.layout.sha256

    @property
    def base(self) -> AnchorRef | None:
        """The base model of an adapter; None for every other kind."""
        return self.anchor if self.kind == "adapter" else None

    @property
    def start(self) -> PolicyVersion:
        """The oldest version whose objects this one needs: a patch's full snapshot, else itself."""
        return PolicyVersion(self.version if self.kind != "patch" or self.anchor is None else self.anchor.version)

    def root_of(self, tensors: Iterable[TensorDigest]) -> str:
        """Return the root that these tensors of the version's own give: of an adapter with its base and its scale."""
        if self.base is None:
            return weights_digest(tensors)
        return adapter_digest(self.base.state_root, self.model_files[0].blob.sha256, tensors)

    @property
    def num_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.objects)

    @property
    def num_words(self) -> int:
        return sum(bucket.num_words for bucket in self.buckets)

    @property
    def num_changed(self) -> int:
        return sum(bucket.num_changed for bucket in self.buckets)

    @property
    def density(self) -> float:
        """Share of the values that differ from the parent, 0 for an empty model."""
        return self.num_changed / self.num_words if self.num_words else 0.0

    def references(self) -> Iterator[BlobRef]:
        """Yield every object the version itself consists of; not its parent's and not its anchor's."""
        yield self.layout
        yield from self.objects
        yield from (file.blob for file in self.model_files)

    def stored_blob(self, stored: StoredRange) -> BlobRef:
        return self.objects[stored.object]

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, data: bytes) -> VersionManifest:
        """Read a manifest, signed or not; raises MalformedFact with the first offending field.

        A signature is not verified here: `signature.TrustedKeys`.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise MalformedFact(f"weights manifest: {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
        line, line_break, signed = data.partition(b"\n")
        if line_break and not SIGNATURE_LINE.fullmatch(signed):
            raise MalformedFact("weights manifest: its second line is not a signature")
        try:
            return cls.model_validate_json(line)
        except ValidationError as err:
            raise MalformedFact(f"weights manifest: {first_problem(err)}") from None

    @model_validator(mode="after")
    def _consistent(self) -> VersionManifest:
        _check_kind(self)
        _check_names([file.name for file in self.model_files])
        for number, bucket in enumerate(self.buckets):
            if bucket.stored is not None:
                _check_range(self, number, bucket.stored)
        return self


def _check_kind(manifest: VersionManifest) -> None:
    whole = {bucket.codec == "safetensors" for bucket in manifest.buckets}
    if whole - {manifest.kind != "patch"}:
        raise ValueError(f"kind {manifest.kind}: every bucket of a patch is a change, and none of another kind")
    if (manifest.anchor is None) != (manifest.kind == "anchor"):
        raise ValueError(f"kind {manifest.kind}: an anchor is its own anchor, every other kind needs one")
    if manifest.kind == "patch" and manifest.parent is None:
        raise ValueError("kind patch: a parent is needed")
    if manifest.kind == "adapter":
        names = [file.name for file in manifest.model_files]
        if names != [ADAPTER_CONFIG]:
            raise ValueError(f"kind adapter: its only model file is {ADAPTER_CONFIG}, got {names}")
        if len(manifest.buckets) != 1:
            raise ValueError(f"kind adapter: its tensors are one bucket, got {len(manifest.buckets)}")
    for ancestor in (manifest.parent, manifest.anchor):
        if ancestor is not None and not is_newer(PolicyVersion(manifest.version), PolicyVersion(ancestor.version)):
            raise ValueError(f"version {manifest.version} cannot build on version {ancestor.version}")


def _check_names(names: list[str]) -> None:
    """Refuse model files that would take the place of weights, or be read as code: they become files of a folder."""
    lower = [name.lower() for name in names]
    if twice := [name for name in names if lower.count(name.lower()) > 1]:
        raise ValueError(f"model file {twice[0]} is there twice")
    if unknown := [name for name in names if not SMALL_FILE.fullmatch(name)]:
        raise ValueError(f"model file {unknown[0]}: expected settings, tokenizer or template; weights are in buckets")


def _check_range(manifest: VersionManifest, number: int, stored: StoredRange) -> None:
    if stored.object >= len(manifest.objects):
        raise ValueError(f"bucket {number}: object {stored.object} of {len(manifest.objects)}")
    size = manifest.objects[stored.object].size_bytes
    if stored.offset + stored.size_bytes > size:
        raise ValueError(f"bucket {number}: {stored.size_bytes} bytes at {stored.offset} of an object of {size}")
