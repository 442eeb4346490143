"""A run's published weights in memory: what a publisher stores and a mirror does, by the protocol's rules alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.protocol.errors import BlobCorrupt, BlobMissing, ChainBroken
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec, patch_segment
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, AdapterConfig, published_name
from penstock.protocol.weights.layout import (
    Bucket,
    TensorSpec,
    WeightLayout,
    bucket_digests,
    build_layout,
    shard_header,
    weights_digest,
)
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, BucketState, ModelFile, StoredRange, VersionManifest
from penstock.protocol.weights.manifest_chain import CatchUp, FetchManifest, Held, plan_catch_up

SPECS = [
    TensorSpec("embed.weight", "bfloat16", (50, 8)),
    TensorSpec("layers.0.w", "bfloat16", (300,)),
    TensorSpec("layers.0.norm", "float32", (8,)),
    TensorSpec("layers.1.w", "bfloat16", (700,)),
    TensorSpec("scales", "float8_e4m3fn", (33,)),
]
LAYOUT = build_layout(SPECS, bucket_bytes=1000)
ADAPTER = AdapterConfig(r=2, lora_alpha=8.0, target_modules=("embed",))
ADAPTER_LAYOUT = build_layout(
    [
        TensorSpec(published_name("embed.lora_A.weight"), "bfloat16", (2, 8)),
        TensorSpec(published_name("embed.lora_B.weight"), "bfloat16", (50, 2)),
    ]
)

State = list[np.ndarray]  # uint8, one for each bucket


def random_state(rng: np.random.Generator) -> State:
    """Draw raw bytes for every bucket."""
    return [rng.integers(0, 256, bucket.num_bytes, dtype=np.uint8) for bucket in LAYOUT.buckets]


def changed_state(state: State, rng: np.random.Generator, density: float) -> State:
    """Return a copy in which each word was redrawn with this probability."""
    after = [bucket.copy() for bucket in state]
    for raw, bucket in zip(after, LAYOUT.buckets, strict=True):
        words = raw.reshape(bucket.num_words, bucket.word_bytes)
        hit = rng.random(len(words)) < density
        words[hit] = rng.integers(0, 256, (int(hit.sum()), bucket.word_bytes), dtype=np.uint8)
    return after


def root_of(state: State) -> str:
    digests = [bucket_digests(bucket, raw.data) for bucket, raw in zip(LAYOUT.buckets, state, strict=True)]
    return weights_digest(digest for of_bucket in digests for digest in of_bucket)


def packed(old: patch_segment.Readable, new: patch_segment.Readable, word_bytes: int, bucket: int = 0) -> bytes:
    changes = patch_segment.difference(old, new, word_bytes)
    return patch_segment.pack(changes, patch_segment.num_words_of(new, word_bytes), bucket=bucket)


def ref_of(key: str, data: bytes) -> BlobRef:
    return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


class WrongBytes(Exception):
    """A hash differs from the expected one."""


class PublishedWeights:
    """Stores versions as objects by key, and brings states to the head as a mirror would."""

    most_bytes = 2**64  # of one read

    def __init__(self, run_id: str = "r1") -> None:
        self.run_id = run_id
        self.objects: dict[str, bytes] = {}
        self.head: VersionManifest | None = None
        self.head_ref: BlobRef | None = None
        self.anchor: AnchorRef | None = None
        self.state: State = []
        self.num_fetched = 0
        self.read: list[str] = []  # keys, in order

    def put(self, key: str, data: bytes) -> BlobRef:
        self.objects[key] = data
        return ref_of(key, data)

    def get(self, ref: BlobRef) -> bytes:
        return self.get_range(ref, 0, ref.size_bytes, ref.sha256)

    def get_range(self, ref: BlobRef, offset: int, size_bytes: int, sha256: str) -> bytes:
        """Return a part of an object; raises what the real store raises."""
        assert size_bytes < self.most_bytes, f"{ref.key}: {size_bytes} bytes"
        self.read.append(ref.key)
        if ref.key not in self.objects:
            raise BlobMissing(ref.key)
        data = self.objects[ref.key][offset : offset + size_bytes]
        if len(data) != size_bytes or hashlib.sha256(data).hexdigest() != sha256:
            raise BlobCorrupt(ref.key)
        return data

    def get_file(self, ref: BlobRef, path: Path) -> None:
        path.write_bytes(self.get(ref))

    def publish_anchor(self, state: State, *, epoch: int = 1) -> VersionManifest:
        version = 0 if self.head is None else self.head.version + 1
        manifest, ref = self._anchor(version, state, epoch, self._ancestor())
        self.head, self.head_ref, self.state = manifest, ref, state
        return manifest

    def add_anchor(self) -> VersionManifest:
        """Write an additional anchor for the head, which remains a patch."""
        assert self.head is not None
        return self._anchor(self.head.version, self.state, self.head.epoch, self.head.parent)[0]

    def publish(self, state: State, *, epoch: int = 1) -> VersionManifest:
        pack, buckets = b"", []
        for number, (old, new) in enumerate(zip(self.state, state, strict=True)):
            encoded = bucket_codec.encode(old, new, LAYOUT.buckets[number].word_bytes, bucket=number)
            stored = None
            if encoded.codec != "none":
                stored = _stored(0, encoded.data, offset=len(pack))
                pack += encoded.data
            buckets.append(
                BucketState(
                    codec=encoded.codec,
                    stored=stored,
                    num_words=LAYOUT.buckets[number].num_words,
                    num_changed=encoded.num_changed,
                    base_xxh3=bucket_codec.bucket_xxh3(old),
                    new_xxh3=bucket_codec.bucket_xxh3(new),
                )
            )
        objects = (self.put(f"p{self._next}", pack),) if pack else ()
        manifest = self._manifest("patch", LAYOUT, objects, buckets, root_of(state), epoch)
        self.head, self.head_ref, self.state = manifest, self.put(f"m{manifest.version}", manifest.to_json()), state
        return manifest

    def publish_adapter(self, raw: np.ndarray, *, epoch: int = 1) -> VersionManifest:
        bucket = ADAPTER_LAYOUT.buckets[0]
        data = shard_header(bucket) + raw.tobytes()
        objects, buckets = (self.put(f"l{self._next}", data),), [_whole(0, bucket, raw, data)]
        file = ModelFile(name=ADAPTER_CONFIG, blob=self.put("adapter config", ADAPTER.to_json()))
        manifest = self._manifest("adapter", ADAPTER_LAYOUT, objects, buckets, "0" * 64, epoch, model_files=(file,))
        manifest = manifest.model_copy(update={"state_root": manifest.root_of(bucket_digests(bucket, raw.data))})
        self.head, self.head_ref = manifest, self.put(f"m{manifest.version}", manifest.to_json())
        return manifest

    def plan(self, held: Held | None, *, max_hops: int = 256) -> CatchUp:
        assert self.head is not None
        fetched: dict[str, VersionManifest] = {}
        while True:
            step = plan_catch_up(self.head, fetched, held, max_hops=max_hops)
            if isinstance(step, CatchUp):
                return step
            assert isinstance(step, FetchManifest)
            assert step.ref.sha256 not in fetched, "asked twice for one manifest"
            self.num_fetched += 1
            fetched[step.ref.sha256] = VersionManifest.from_json(self.objects[step.ref.key])

    def carry_out(self, plan: CatchUp, state: State) -> State:
        """Apply a plan bucket by bucket, in one pass each, and compare each bucket once, at the end.

        Raises WrongBytes, SegmentRefused or ChainBroken; then nothing is served.
        """
        layout = ADAPTER_LAYOUT if plan.target.kind == "adapter" else LAYOUT
        for manifest in (plan.target, *plan.manifests):
            if [bucket.num_words for bucket in layout.buckets] != [bucket.num_words for bucket in manifest.buckets]:
                raise ChainBroken(f"version {manifest.version}: its buckets are not those of its layout")
        result = []
        for number, bucket in enumerate(layout.buckets):
            raw = state[number].copy() if state else np.zeros(bucket.num_bytes, np.uint8)
            for manifest, change in plan.changes_of(number):
                assert change.stored is not None
                stored = change.stored
                try:
                    blob = manifest.stored_blob(stored)
                    data = self.get_range(blob, stored.offset, stored.size_bytes, stored.sha256)
                except (BlobMissing, BlobCorrupt):
                    raise WrongBytes("stored bytes") from None
                if change.codec == "safetensors":
                    raw[:] = np.frombuffer(data[len(shard_header(bucket)) :], np.uint8)
                    continue
                parsed = bucket_codec.parse(
                    change.codec, data, num_words=bucket.num_words, word_bytes=bucket.word_bytes, bucket=number
                )
                bucket_codec.apply(parsed, raw)
            if bucket_codec.bucket_xxh3(raw) != plan.target.buckets[number].new_xxh3:
                raise WrongBytes(f"bucket {number}")
            result.append(raw)
        return result

    @property
    def _next(self) -> int:
        assert self.head is not None
        return self.head.version + 1

    def _ancestor(self) -> Ancestor | None:
        if self.head is None or self.head_ref is None:
            return None
        return Ancestor(version=self.head.version, manifest=self.head_ref, state_root=self.head.state_root)

    def _anchor(
        self, version: int, state: State, epoch: int, parent: Ancestor | None
    ) -> tuple[VersionManifest, BlobRef]:
        blobs, buckets = [], []
        for number, (bucket, raw) in enumerate(zip(LAYOUT.buckets, state, strict=True)):
            data = shard_header(bucket) + raw.tobytes()
            blobs.append(self.put(f"a{version}.{number}", data))
            buckets.append(_whole(number, bucket, raw, data))
        self.anchor = None
        of_version = {"version": version, "step": version, "parent": parent}
        manifest = self._manifest("anchor", LAYOUT, blobs, buckets, root_of(state), epoch, **of_version)
        ref = self.put(f"am{version}", manifest.to_json())
        of_state = {"state_root": manifest.state_root, "num_bytes": manifest.num_bytes}
        self.anchor = AnchorRef(version=version, manifest=ref, **of_state)
        return manifest, ref

    def _manifest(
        self,
        kind: str,
        layout: WeightLayout,
        objects: Sequence[BlobRef],
        buckets: Sequence[BucketState],
        state_root: str,
        epoch: int,
        **more: Any,
    ) -> VersionManifest:
        fields: dict[str, Any] = {
            "kind": kind,
            "run_id": self.run_id,
            "epoch": epoch,
            "anchor": self.anchor,
            "layout": self.put("adapter layout" if kind == "adapter" else "layout", layout.to_json()),
            "objects": tuple(objects),
            "buckets": tuple(buckets),
            "state_root": state_root,
        }
        if "version" not in more:
            fields |= {"version": self._next, "step": self._next, "parent": self._ancestor()}
        return VersionManifest(**fields | more)


def _stored(number: int, data: bytes, *, offset: int = 0) -> StoredRange:
    digest = hashlib.sha256(data).hexdigest()
    return StoredRange(object=number, offset=offset, size_bytes=len(data), sha256=digest)


def _whole(number: int, bucket: Bucket, raw: np.ndarray, data: bytes) -> BucketState:
    """Return the state of a bucket that is stored whole, as object ``number``."""
    return BucketState(
        codec="safetensors",
        stored=_stored(number, data),
        num_words=bucket.num_words,
        num_changed=bucket.num_words,
        new_xxh3=bucket_codec.bucket_xxh3(raw),
    )


def held_of(manifest: VersionManifest) -> Held:
    return Held(PolicyVersion(manifest.version), manifest.state_root)
