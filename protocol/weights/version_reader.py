"""Read versions from the object store: manifests, plans, and the raw buckets of a plan.

A mirror, a resuming trainer and `penstock weights export` all use it. Everything is verified:
manifests and segments against their sha256, segments are parsed whole before a byte is written, and
the result is compared with the target's xxh3 and root.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.errors import (
    BlobCorrupt,
    BlobMissing,
    ChainBroken,
    MalformedFact,
    MalformedWeights,
    SegmentRefused,
    SignatureRefused,
    StateMismatch,
)
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.layout import MAX_LAYOUT_BYTES, WeightLayout, shard_header
from penstock.protocol.weights.manifest import MAX_MANIFEST_BYTES, BucketState, VersionManifest
from penstock.protocol.weights.manifest_chain import MAX_HOPS, CatchUp, FetchManifest, Held, plan_catch_up, verify_base
from penstock.protocol.weights.patch_segment import Bytes, as_bytes, union
from penstock.protocol.weights.shared_segments import SharedSegments

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are configured

UNUSABLE = (
    BlobMissing,
    BlobCorrupt,
    ChainBroken,
    MalformedFact,
    MalformedWeights,
    SegmentRefused,
    SignatureRefused,
    StateMismatch,
)
PARALLEL_BUCKETS = 4  # fetched and applied concurrently; each needs about twice its raw size of memory meanwhile
_MANIFESTS_KEPT = 64  # after a plan; a large model's take a hundred kilobytes each
_MANIFESTS_PLANNED = 2 * MAX_HOPS  # while a plan is made, which needs all that it has fetched


class ChangedWords(NamedTuple):
    """Of a bucket: places, strictly increasing, int64 [n]; the words there before and after, unsigned [n]."""

    words: NDArray[np.int64]
    old: NDArray[Any]
    new: NDArray[Any]


class WeightReader:
    """Read one run's versions. Thread-safe; raises the errors of `UNUSABLE`, or those of an unreachable store."""

    def __init__(
        self, blobs: Blobs, run_id: str, *, cache_bytes: int = 0, trusted_keys: TrustedKeys | None = None,
        shared: SharedSegments | None = None,
    ) -> None:  # fmt: skip
        """Fetch nothing yet. One of ``trusted_keys`` must have signed each manifest; None: signatures are not verified.

        ``cache_bytes`` of segments are kept in memory, for a caller that applies each to a second copy; those that
        other processes of this host have ``shared`` are not downloaded.
        """
        self.num_bytes = 0  # of weights, fetched so far
        self._blobs = blobs
        self._run_id = run_id
        self._cache_bytes = cache_bytes
        self._trusted_keys, self._shared = trusted_keys, shared
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._manifests: OrderedDict[str, VersionManifest] = OrderedDict()
        self._layouts: dict[str, WeightLayout] = {}
        self._lock = threading.Lock()

    def manifest(self, ref: BlobRef, version: PolicyVersion) -> VersionManifest:
        """Return the manifest of a version of this run.

        Raises ChainBroken for another version, and SignatureRefused for one that no trusted key has signed.
        """
        version_manifest = self._manifests.get(ref.sha256)
        if version_manifest is None:
            if ref.size_bytes > MAX_MANIFEST_BYTES:
                raise MalformedFact(f"{ref.key}: {ref.size_bytes} bytes, the limit is {MAX_MANIFEST_BYTES}")
            data = self._blobs.get(ref)
            if self._trusted_keys is not None:
                self._trusted_keys.verify(data, ref.key)
            version_manifest = VersionManifest.from_json(data)
        if (version_manifest.run_id, version_manifest.version) != (self._run_id, version):
            raise ChainBroken(
                f"version {version} of run {self._run_id}: its manifest {ref.key} is of version "
                f"{version_manifest.version} of run {version_manifest.run_id}"
            )
        with self._lock:
            self._manifests[ref.sha256] = version_manifest
            self._manifests.move_to_end(ref.sha256)
        self._forget_oldest(_MANIFESTS_PLANNED)
        return version_manifest

    def base(self, adapter: VersionManifest) -> VersionManifest:
        assert adapter.base is not None
        base_manifest = self.manifest(adapter.base.manifest, PolicyVersion(adapter.base.version))
        verify_base(adapter, base_manifest)
        return base_manifest

    def layout(self, manifest: VersionManifest) -> WeightLayout:
        """Return a version's layout; raises ChainBroken when its buckets are not those that the manifest names.

        So a caller may allocate a bucket: what is stored whole has the size that the layout states.
        """
        weight_layout = self._layouts.get(manifest.layout_id)
        if weight_layout is None:
            if manifest.layout.size_bytes > MAX_LAYOUT_BYTES:
                raise MalformedFact(
                    f"{manifest.layout.key}: {manifest.layout.size_bytes} bytes, the limit is {MAX_LAYOUT_BYTES}"
                )
            weight_layout = WeightLayout.from_json(self._blobs.get(manifest.layout))
            self._layouts[manifest.layout_id] = weight_layout
        if [bucket.num_words for bucket in weight_layout.buckets] != [bucket.num_words for bucket in manifest.buckets]:
            raise ChainBroken(f"version {manifest.version}: its buckets are not those of its layout")
        for number, (bucket, state) in enumerate(zip(weight_layout.buckets, manifest.buckets, strict=True)):
            if state.codec == "safetensors" and state.stored is not None and state.stored.size_bytes < bucket.num_bytes:
                raise ChainBroken(
                    f"version {manifest.version}: bucket {number} has {bucket.num_bytes} bytes in its layout, "
                    f"{state.stored.size_bytes} are stored"
                )
        return weight_layout

    def layout_of(self, plan: CatchUp) -> WeightLayout:
        if plan.anchor is not None:
            self.layout(plan.anchor)
        return self.layout(plan.target)

    def plan(self, target: VersionManifest, held: Held | None) -> CatchUp:
        while True:
            step = plan_catch_up(target, self._manifests, held)
            if isinstance(step, CatchUp):
                self._forget_oldest(_MANIFESTS_KEPT)
                return step
            assert isinstance(step, FetchManifest)
            self.manifest(step.ref, step.version)

    def apply(self, plan: CatchUp, number: int, raw: Bytes) -> None:
        """Bring one raw bucket to the plan's target, in place; the caller verifies the result.

        Every change is fetched and verified before the first byte is written.
        """
        for change in self._changes(plan, number):
            if isinstance(change, bucket_codec.Parsed | bucket_codec.ParsedRaw):
                bucket_codec.apply(change, raw)
            else:
                raw[:] = change

    def changed_words(self, plan: CatchUp, number: int, raw: Bytes) -> ChangedWords:
        """Return the words of a bucket that a plan of patches writes, and what they become; ``raw``, before, stays."""
        bucket, written, words = self.layout(plan.target).buckets[number], [], np.empty(0, np.int64)
        before = raw.view(f"<u{bucket.word_bytes}")
        for change in self._changes(plan, number):
            assert not isinstance(change, np.ndarray)
            for byte, plane in enumerate(change.planes):
                if isinstance(plane, np.ndarray):  # the bucket is stored whole
                    indices, values = np.arange(len(plane)), plane
                else:
                    blocks = [(words[:0], raw[:0]), *((block.indices, block.values) for block in plane.blocks())]
                    indices, values = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
                written.append((byte, indices, values))
                words = union(words, indices)
        new = before[words]
        by_byte = new.view(np.uint8).reshape(len(words), bucket.word_bytes)
        for byte, indices, values in written:
            rows = slice(None) if len(indices) == len(words) else np.searchsorted(words, indices)
            by_byte[rows, byte] = values
        return ChangedWords(words, before[words], new)

    def _changes(self, plan: CatchUp, number: int) -> list[bucket_codec.Change | Bytes]:
        """Return the changes of a bucket, fetched and verified; of a full snapshot the raw bytes."""
        bucket = self.layout(plan.target).buckets[number]
        steps = [(state, self._stored(manifest, state)) for manifest, state in plan.changes_of(number)]
        return [
            as_bytes(data)[self._header_bytes(plan, number, data) :]
            if state.codec == "safetensors"
            else bucket_codec.parse(
                state.codec, data, num_words=bucket.num_words, word_bytes=bucket.word_bytes, bucket=number
            )
            for state, data in steps
        ]

    def bring(self, plan: CatchUp, number: int, raw: Bytes) -> bool:
        """Bring a raw bucket to the plan's target and verify it; if wrong, rebuild from the snapshot and return False.

        A bucket with a bit error, or of another base, is detected by its xxh3 and rebuilt. Raises
        StateMismatch when the rebuilt bucket is wrong too: the version itself is damaged.
        """
        expected = plan.target.buckets[number].new_xxh3
        self.apply(plan, number, raw)
        if bucket_codec.bucket_xxh3(raw) == expected:
            return True
        if plan.anchor is None:
            self.apply(self.plan(plan.target, None), number, raw)
        if (actual := bucket_codec.bucket_xxh3(raw)) != expected:
            raise StateMismatch(
                f"version {plan.target.version}: bucket {number} has xxh3 {actual}, its manifest says {expected}"
            )
        return False

    def _forget_oldest(self, kept: int) -> None:
        """Forget the manifests that were not read for the longest time: a run makes one with every step."""
        with self._lock:
            while len(self._manifests) > kept:
                self._manifests.popitem(last=False)

    def _stored(self, manifest: VersionManifest, state: BucketState) -> bytes:
        stored = state.stored
        assert stored is not None
        with self._lock:
            if (kept := self._cache.get(stored.sha256)) is not None:
                return kept
        where = (manifest.stored_blob(stored), stored.offset, stored.size_bytes, stored.sha256)
        download = functools.partial(self._blobs.get_range, *where)
        if self._shared is None:
            data = download()
        else:
            data = self._shared.fetch(stored.sha256, stored.size_bytes, download, manifest.version)
        with self._lock:
            self.num_bytes += len(data)
            if state.codec != "safetensors":
                self._cache[stored.sha256] = data
                while self._cache and sum(map(len, self._cache.values())) > self._cache_bytes:
                    self._cache.popitem(last=False)
        return data

    def _header_bytes(self, plan: CatchUp, number: int, data: bytes) -> int:
        bucket = self.layout(plan.target).buckets[number]
        header = shard_header(bucket)
        if data[: len(header)] != header or len(data) != len(header) + bucket.num_bytes:
            raise StateMismatch(
                f"version {plan.target.version}: the snapshot of bucket {number} does not fit its layout"
            )
        return len(header)


def for_buckets(numbers: Sequence[int], action: Callable[[int], object], *, at_once: int = PARALLEL_BUCKETS) -> None:
    """Do one thing for each number, so many at once; raises the first error, by number, once all have ended."""
    if len(numbers) == 1:
        action(numbers[0])
        return
    with ThreadPoolExecutor(at_once, thread_name_prefix="bucket") as pool:
        for done in [pool.submit(action, number) for number in numbers]:
            done.result()
