"""What one rank does to publish a model: compares, encodes and stores its own buckets, as rank 0 requests.

A rank holds its buckets of the *committed* version, the one that the head names, and the copies that wait to be
published. Neither changes before rank 0 commits a version: a publication that fails changes nothing here, and no
manifest names what it stored.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Literal

from penstock.protocol import blob_keys
from penstock.protocol.facts import BlobRef, Count, Wire
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.bucket_codec import Encoded
from penstock.protocol.weights.digest import TensorDigest
from penstock.protocol.weights.layout import shard_header, shard_name
from penstock.protocol.weights.manifest import BucketState, StoredRange
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.parallel_dims import Share
from penstock.trainer.publishing.weight_buckets import WeightBuckets, assign_buckets, read_buckets

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are configured

_COPY_DEADLINE_S = 600.0  # a rank that trails rank 0 by more than this is stuck


class Digests(Wire):
    """Answer: every tensor of a rank's buckets, as [name, dtype, shape, xxh3]."""

    tensors: tuple[tuple[str, str, tuple[Count, ...], str], ...] = ()
    problem: str | None = None  # why there are none

    @classmethod
    def of(cls, buckets: WeightBuckets) -> Digests:
        """Wait for the hashes of buckets."""
        return cls(tensors=tuple((d.name, d.dtype, d.shape, d.xxh3) for d in buckets.digests()))

    def unwrap(self) -> list[TensorDigest]:
        """Return what `weights_digest` takes."""
        return [TensorDigest(*tensor) for tensor in self.tensors]


class PatchSize(Wire):
    """Answer: the size of the patch of a rank's buckets."""

    num_bytes: Count
    num_changed: Count  # words


class StoredBuckets(Wire):
    """Answer: what a rank has stored of a version; ranges index these ``objects``."""

    objects: tuple[BlobRef, ...] = ()
    numbers: tuple[Count, ...] = ()  # of the buckets, as many as ``states``
    states: tuple[BucketState, ...] = ()


class Done(Wire):
    """Answer: the request was carried out."""


class Request(Wire):
    """What rank 0 asks of every rank."""

    action: str
    copy_id: Count = 0  # which copy of the weights
    version: Count = 0
    attempt: str = ""
    file_name: str = ""  # of the only bucket, if there is one only
    head: BlobRef | None = None
    source: Literal["copy", "committed", "retained"] = "copy"  # what is stored whole
    retain: bool = False  # keep the committed buckets, too, for a full snapshot in the background


class RankPublisher:
    """The buckets of one rank. Thread-safe: copies come from the training thread, requests on other threads."""

    def __init__(
        self, blobs: Blobs, run_id: str, share: Share | None = None, trusted_keys: TrustedKeys | None = None
    ) -> None:
        """Start with no buckets; ``share`` is this rank's share of all buckets, by default all of them.

        With ``trusted_keys``, a head that none of them has signed is not read.
        """
        self._blobs, self._run_id, self._trusted_keys = blobs, run_id, trusted_keys
        self._share = share or Share()
        self._copies: dict[int, WeightBuckets] = {}
        self._permanent: dict[int, WeightBuckets] = {}  # the models that adapters are applied to
        self._committed: WeightBuckets | None = None
        self._retained: WeightBuckets | None = None  # what a full snapshot is being written from
        self._changes: dict[int, Encoded] = {}  # of the copy that was compared last, by bucket
        self._changed = threading.Condition()

    def hold(self, buckets: WeightBuckets, *, permanently: bool = False) -> None:
        """Hold a copy that may be published; ``permanently`` if it may be requested more than once."""
        with self._changed:
            (self._permanent if permanently else self._copies)[buckets.copy_id] = buckets
            self._changed.notify_all()

    def discard(self, wanted: Collection[int]) -> None:
        """Release the copies that will not be published: all but the ``wanted`` ids."""
        with self._changed:
            self._copies = {copy_id: copy for copy_id, copy in self._copies.items() if copy_id in wanted}

    def answer(self, request: Request) -> Wire:
        """Carry out a request of rank 0; raises BlobError."""
        return _ACTIONS[request.action](self, request)

    def _digests(self, request: Request) -> Digests:
        return Digests.of(self._copy(request.copy_id))

    def _read_head(self, request: Request) -> Digests:
        """Read this rank's buckets of a version from the object store; they are the committed ones from now on."""
        assert request.head is not None
        reader = WeightReader(self._blobs, self._run_id, trusted_keys=self._trusted_keys)
        try:
            manifest = reader.manifest(request.head, PolicyVersion(request.version))
            numbers = assign_buckets(reader.layout(manifest), self._share.count)[self._share.index]
            self._committed = read_buckets(reader.plan(manifest, None), reader, numbers)
        except UNUSABLE as err:
            self._committed = None
            return Digests(problem=str(err))
        return Digests.of(self._committed)

    def _compare(self, request: Request) -> PatchSize:
        """Encode what differs between a copy and the committed buckets."""
        copy, base = self._copy(request.copy_id), self._committed
        assert base is not None
        self._changes = {}
        for number, raw in copy.raw.items():
            word_bytes = copy.layout.buckets[number].word_bytes
            self._changes[number] = encoded = bucket_codec.encode(base.raw[number], raw, word_bytes, bucket=number)
            copy.set_xxh3(number, base.xxh3(number) if encoded.codec == "none" else None)
        found = self._changes.values()
        return PatchSize(num_bytes=sum(len(e.data) for e in found), num_changed=sum(e.num_changed for e in found))

    def _store_patch(self, request: Request) -> StoredBuckets:
        """Store the segments that were compared last, in one object."""
        copy, base = self._copy(request.copy_id), self._committed
        assert base is not None
        offset, states = 0, []
        for number, encoded in self._changes.items():
            stored = None
            if encoded.codec != "none":
                digest = hashlib.sha256(encoded.data).hexdigest()
                stored = StoredRange(object=0, offset=offset, size_bytes=len(encoded.data), sha256=digest)
                offset += len(encoded.data)
            states.append(
                BucketState(
                    codec=encoded.codec,
                    stored=stored,
                    num_words=copy.layout.buckets[number].num_words,
                    num_changed=encoded.num_changed,
                    base_xxh3=base.xxh3(number),
                    new_xxh3=copy.xxh3(number),
                )
            )
        objects: tuple[BlobRef, ...] = ()
        if offset:
            version = PolicyVersion(request.version)
            key = blob_keys.weights_pack(self._run_id, version, request.attempt, self._share.index)
            objects = (self._put(key, b"".join(encoded.data for encoded in self._changes.values())),)
        return StoredBuckets(objects=objects, numbers=tuple(self._changes), states=tuple(states))

    def _store_whole(self, request: Request) -> StoredBuckets:
        """Store every bucket as a safetensors file."""
        buckets = self._source(request)
        objects, states = [], []
        for number, raw in buckets.raw.items():
            bucket = buckets.layout.buckets[number]
            name = request.file_name or shard_name(number, len(buckets.layout.buckets))
            key = blob_keys.weights_shard(self._run_id, PolicyVersion(request.version), request.attempt, name)
            blob = self._put(key, shard_header(bucket) + raw.tobytes())
            stored = StoredRange(object=len(objects), offset=0, size_bytes=blob.size_bytes, sha256=blob.sha256)
            objects.append(blob)
            states.append(
                BucketState(
                    codec="safetensors",
                    stored=stored,
                    num_words=bucket.num_words,
                    num_changed=bucket.num_words,
                    new_xxh3=buckets.xxh3(number),
                )
            )
        return StoredBuckets(objects=tuple(objects), numbers=tuple(buckets.raw), states=tuple(states))

    def _commit(self, request: Request) -> Done:
        """Take a copy as the committed version: the next patch is made against it."""
        self._committed = copy = self._copy(request.copy_id)
        self._changes = {}
        if request.retain:
            self._retained = copy
        with self._changed:
            self._copies.pop(request.copy_id, None)
        return Done()

    def _release(self, _: Request) -> Done:
        """Release what was retained: the full snapshot is written, or has failed."""
        self._retained = None
        return Done()

    def _source(self, request: Request) -> WeightBuckets:
        if request.source == "copy":
            return self._copy(request.copy_id)
        found = self._committed if request.source == "committed" else self._retained
        assert found is not None
        return found

    def _put(self, key: str, data: bytes) -> BlobRef:
        reference = self._blobs.put(key, data)
        crash_points.reach(CrashPoint.OBJECT_STORED)
        return reference

    def _copy(self, copy_id: int) -> WeightBuckets:
        """Return a copy, waiting for it: this rank may still be making what rank 0 has made already."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: copy_id in self._copies or copy_id in self._permanent, _COPY_DEADLINE_S
            ):
                raise PublicationFailed(
                    f"copy {copy_id} of the weights was not made within {_COPY_DEADLINE_S:.0f} s: the training thread "
                    "of this rank is behind rank 0; look for a slow or stuck rank"
                )
            return self._copies[copy_id] if copy_id in self._copies else self._permanent[copy_id]


_ACTIONS: Mapping[str, Callable[[RankPublisher, Request], Wire]] = {
    "digests": RankPublisher._digests,
    "read_head": RankPublisher._read_head,
    "compare": RankPublisher._compare,
    "store_patch": RankPublisher._store_patch,
    "store_whole": RankPublisher._store_whole,
    "commit": RankPublisher._commit,
    "release": RankPublisher._release,
}
