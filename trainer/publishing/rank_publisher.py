"""Publishes a model from all ranks: each compares, encodes and stores its buckets when rank 0 orders it.

A rank holds its buckets of the *committed* version, the one that the head names, and the copies that wait to be published. Neither changes
before rank 0 commits a version: a publication that fails changes nothing here, and no manifest names what it stored.

Orders and answers of `PublishCoordinator` have separate channels, one for publications and one for full snapshots in the background, so
training continues on all ranks meanwhile. They carry little data: each rank sends its weights to the object store itself.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from penstock.protocol import blob_keys
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.bucket_codec import Encoded
from penstock.protocol.weights.layout import TensorDigest, shard_header, shard_name, weights_digest
from penstock.protocol.weights.manifest import BucketState, StoredRange
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.version_reader import PARALLEL_BUCKETS, UNUSABLE, WeightReader
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.parallel_dims import Share
from penstock.trainer.publishing.weight_buckets import WeightBuckets, assign_buckets, read_buckets
from penstock.trainer.rank_orders import RankOrders, order
from penstock.trainer.ranks import Ranks

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are configured


T = TypeVar("T")
Source = Literal["copy", "committed", "retained"]
_COPY_DEADLINE_S = 600.0  # a rank that trails rank 0 by more than this is stuck


@dataclass(frozen=True, slots=True)
class PatchSize:
    num_bytes: int
    num_changed: int  # words


@dataclass(frozen=True, slots=True)
class StoredBuckets:
    objects: tuple[BlobRef, ...]
    numbers: tuple[int, ...]  # of the buckets, as many as ``states``
    states: tuple[BucketState, ...]


class RankPublisher:
    """The buckets of one rank. Thread-safe: copies come from the training thread, orders on other threads."""

    def __init__(
        self, blobs: Blobs, run_id: str, share: Share | None = None, trusted_keys: TrustedKeys | None = None
    ) -> None:
        self._blobs, self._run_id, self._trusted_keys = blobs, run_id, trusted_keys
        self._share, self._shared = share or Share(), SharedSegments(run_id)
        self._copies: dict[int, WeightBuckets] = {}
        self._permanent: dict[int, WeightBuckets] = {}  # the models that adapters are applied to
        self._committed: WeightBuckets | None = None
        self._retained: WeightBuckets | None = None  # what a full snapshot is being written from
        self._changes: dict[int, Encoded] = {}  # of the copy that was compared last, by bucket
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "forget")
        self._forgotten: Future[None] | None = None

    def hold(self, buckets: WeightBuckets, *, permanently: bool = False) -> None:
        with self._changed:
            (self._permanent if permanently else self._copies)[buckets.copy_id] = buckets
            self._changed.notify_all()

    def discard(self, wanted: Collection[int]) -> None:
        """Release the copies except the ``wanted`` ids, and what only the others need of the words that versions replaced."""
        with self._changed:
            held, committed = self._copies, self._committed
            self._copies = {copy_id: copy for copy_id, copy in held.items() if copy_id in wanted}
            if committed is None or (self._forgotten is not None and not self._forgotten.done()):
                return
            if self._forgotten is not None:
                self._forgotten.result()
            oldest, newest = self._retained or committed, max((committed.copy_id, *held))
            needed = frozenset({*wanted, committed.copy_id})
            self._forgotten = self._thread.submit(oldest.forget, needed, before=newest)

    @order
    def digests(self, copy_id: int) -> list[TensorDigest]:
        """Return the digest of every tensor of this rank's buckets, waiting for the hashing thread."""
        return self._copy(copy_id).digests()

    @order
    def read_head(self, head: BlobRef, version: PolicyVersion) -> list[TensorDigest]:
        """Read this rank's buckets of a version, the committed ones from now on; raises PublicationFailed."""
        reader = WeightReader(self._blobs, self._run_id, trusted_keys=self._trusted_keys)
        try:
            manifest = reader.manifest(head, version)
            numbers = assign_buckets(reader.layout(manifest), self._share.count)[self._share.index]
            self._committed = read_buckets(reader.plan(manifest, None), reader, numbers)
        except UNUSABLE as err:
            self._committed = None
            raise PublicationFailed(str(err)) from err
        return self._committed.digests()

    @order
    def compare(self, copy_id: int) -> PatchSize:
        """Encode what differs between a copy and the committed buckets."""
        copy, base = self._copy(copy_id), self._committed
        assert base is not None
        encoded = _in_parallel(lambda number: copy.encoded_since(base, number), copy.raw)
        self._changes = dict(zip(copy.raw, encoded, strict=True))
        changes = self._changes.values()
        return PatchSize(num_bytes=sum(len(e.data) for e in changes), num_changed=sum(e.num_changed for e in changes))

    @order
    def store_patch(self, copy_id: int, version: PolicyVersion, attempt: str) -> StoredBuckets:
        """Store the segments that were compared last, in one object; raises BlobError."""
        copy, base = self._copy(copy_id), self._committed
        assert base is not None
        offset, states = 0, []
        for number, encoded in self._changes.items():
            stored = None
            if encoded.codec != "none":
                digest = hashlib.sha256(encoded.data).hexdigest()
                stored = StoredRange(object=0, offset=offset, size_bytes=len(encoded.data), sha256=digest)
                offset += len(encoded.data)
            states.append(BucketState(
                codec=encoded.codec, stored=stored, num_words=copy.layout.buckets[number].num_words, num_changed=encoded.num_changed,
                base_xxh3=base.xxh3(number), new_xxh3=copy.xxh3(number),
            ))  # fmt: skip
        objects: tuple[BlobRef, ...] = ()
        if offset:
            key = blob_keys.weights_pack(self._run_id, version, attempt, self._share.index)
            with ThreadPoolExecutor(1, "share") as beside:  # a manifest names it only when both are done
                beside.submit(self._offer, states)
                objects = (self._blobs.put(key, b"".join(encoded.data for encoded in self._changes.values())),)
            crash_points.reach(CrashPoint.OBJECT_STORED)
        return StoredBuckets(objects, tuple(self._changes), tuple(states))

    @order
    def store_whole(
        self, source: Source, version: PolicyVersion, attempt: str, copy_id: int = 0, file_name: str = ""
    ) -> StoredBuckets:
        """Store every bucket of a copy, or of what is committed or retained, as a safetensors file; raises BlobError.

        It is called ``file_name`` if it is the only one.
        """
        held = {"committed": self._committed, "retained": self._retained}
        buckets = self._copy(copy_id) if source == "copy" else held[source]
        assert buckets is not None
        num_files = len(buckets.layout.buckets)

        def put(number: int) -> BlobRef:
            name = file_name or shard_name(number, num_files)
            key = blob_keys.weights_shard(self._run_id, version, attempt, name)
            data = shard_header(buckets.layout.buckets[number]) + buckets.words(number).data
            blob = self._blobs.put(key, data)
            if source != "retained":  # which no worker waits for, and which would take the room of patches
                self._shared.offer(blob.sha256, data)
            return blob

        objects, states = [], []
        for number, blob in zip(buckets.raw, _in_parallel(put, buckets.raw), strict=True):
            crash_points.reach(CrashPoint.OBJECT_STORED)
            num_words = buckets.layout.buckets[number].num_words
            stored = StoredRange(object=len(objects), offset=0, size_bytes=blob.size_bytes, sha256=blob.sha256)
            objects.append(blob)
            states.append(BucketState(
                codec="safetensors", stored=stored, num_words=num_words, num_changed=num_words, new_xxh3=buckets.xxh3(number)
            ))  # fmt: skip
        return StoredBuckets(tuple(objects), tuple(buckets.raw), tuple(states))

    @order
    def commit(self, copy_id: int, retain: bool) -> None:
        """Take a copy as the committed version, against which the next patch is made; ``retain`` it for a full snapshot as well."""
        self._committed = copy = self._copy(copy_id)
        self._changes = {}
        if retain:
            self._retained = copy
        with self._changed:
            self._copies.pop(copy_id, None)

    @order
    def release(self) -> None:
        """Release what was retained: the full snapshot is written, or has failed."""
        self._retained = None

    def _offer(self, states: Iterable[BucketState]) -> None:
        for encoded, state in zip(self._changes.values(), states, strict=True):
            if state.stored is not None:
                self._shared.offer(state.stored.sha256, encoded.data)

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


def _in_parallel(call: Callable[[int], T], numbers: Iterable[int]) -> Iterator[T]:
    with ThreadPoolExecutor(PARALLEL_BUCKETS, "bucket") as pool:
        yield from pool.map(call, numbers)


@dataclass(frozen=True, slots=True)
class StoredObjects:
    attempt: str  # in the keys of one attempt to store a version, so that no object is ever overwritten
    objects: tuple[BlobRef, ...]
    buckets: tuple[BucketState, ...]


class PublishCoordinator:
    """Has every rank publish its buckets. Used by one thread; `store_retained` may run at the same time in another."""

    def __init__(self, publisher: RankPublisher, ranks: Ranks | None = None) -> None:
        """Made on all ``ranks``, of which those but 0 only answer; without them one process is alone. ``publisher`` is this rank's."""
        self.own = publisher
        self._orders = RankOrders(publisher, ranks, "publisher", PublicationFailed)
        self._in_background = RankOrders(publisher, ranks, "full-snapshot", PublicationFailed)

    def state_root(self, copy_id: int) -> str:
        return _root(self._orders.ask(RankPublisher.digests, copy_id))

    def read_head(self, head: BlobRef, version: PolicyVersion) -> str:
        return _root(self._orders.ask(RankPublisher.read_head, head, version))

    def compare(self, copy_id: int) -> PatchSize:
        sizes = self._orders.ask(RankPublisher.compare, copy_id)
        return PatchSize(sum(size.num_bytes for size in sizes), sum(size.num_changed for size in sizes))

    def store_patch(self, copy_id: int, version: PolicyVersion) -> StoredObjects:
        attempt = secrets.token_hex(4)
        return _joined(attempt, self._orders.ask(RankPublisher.store_patch, copy_id, version, attempt))

    def store_whole(self, copy_id: int | None, version: PolicyVersion, *, file_name: str = "") -> StoredObjects:
        """Store a copy; None: what is committed."""
        attempt, source = secrets.token_hex(4), "committed" if copy_id is None else "copy"
        stored = self._orders.ask(RankPublisher.store_whole, source, version, attempt, copy_id or 0, file_name)
        return _joined(attempt, stored)

    def commit(self, copy_id: int, *, retain: bool) -> None:
        self._orders.ask(RankPublisher.commit, copy_id, retain)

    def store_retained(self, version: PolicyVersion) -> StoredObjects:
        attempt = secrets.token_hex(4)
        try:
            return _joined(attempt, self._in_background.ask(RankPublisher.store_whole, "retained", version, attempt))
        finally:
            self._in_background.ask(RankPublisher.release)


def _joined(attempt: str, parts: Sequence[StoredBuckets]) -> StoredObjects:
    objects: list[BlobRef] = []
    buckets: dict[int, BucketState] = {}
    for part in parts:
        for number, state in zip(part.numbers, part.states, strict=True):
            stored = state.stored and state.stored.model_copy(update={"object": state.stored.object + len(objects)})
            buckets[number] = state.model_copy(update={"stored": stored})
        objects += part.objects
    return StoredObjects(attempt, tuple(objects), tuple(buckets[number] for number in sorted(buckets)))


def _root(parts: Sequence[Sequence[TensorDigest]]) -> str:
    return weights_digest(digest for part in parts for digest in part)
