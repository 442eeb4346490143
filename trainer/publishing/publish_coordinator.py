"""Rank 0's side of publishing a model: it has the `RankPublisher` of every rank do the same, and puts the results together.

Orders and answers have channels of their own, one for publications and one for full snapshots in the background, so
training continues on all ranks meanwhile. They carry little data: each rank sends its weights to the object store itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.protocol.facts import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.digest import TensorDigest, weights_digest
from penstock.protocol.weights.manifest import BucketState
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.rank_publisher import PatchSize, RankPublisher, StoredBuckets
from penstock.trainer.publishing.weight_buckets import WeightBuckets
from penstock.trainer.rank_orders import RankOrders
from penstock.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """The objects of a version, and the state of every bucket in the layout's order."""

    attempt: str
    objects: tuple[BlobRef, ...]
    buckets: tuple[BucketState, ...]


class PublishCoordinator:
    """Has every rank publish its buckets. Used by one thread; `store_retained` may run at the same time in another."""

    def __init__(self, own: RankPublisher, ranks: Ranks | None = None) -> None:
        """``own`` is this rank's publisher. Made on all ``ranks``, of which those but 0 only answer; without them one process is alone."""
        self._own = own
        self._orders = RankOrders(own, ranks, "publisher", PublicationFailed)
        self._in_background = RankOrders(own, ranks, "full-snapshot", PublicationFailed)

    def hold(self, buckets: WeightBuckets) -> None:
        """Hold rank 0's buckets of a version that may be published."""
        self._own.hold(buckets)

    def discard(self, wanted: Collection[int]) -> None:
        """Release rank 0's copies except the ``wanted`` ids; the other ranks do so with the order of the next copy."""
        self._own.discard(wanted)

    def state_root(self, copy_id: int) -> str:
        """Return the root of a copy of the weights."""
        return _root(self._orders.ask(RankPublisher.digests, copy_id))

    def read_head(self, head: BlobRef, version: PolicyVersion) -> str:
        """Have every rank read its buckets of the head; returns the root, raises PublicationFailed."""
        return _root(self._orders.ask(RankPublisher.read_head, head, version))

    def compare(self, copy_id: int) -> PatchSize:
        """Have every rank compare and encode its buckets; returns the size of the whole patch."""
        sizes = self._orders.ask(RankPublisher.compare, copy_id)
        return PatchSize(sum(size.num_bytes for size in sizes), sum(size.num_changed for size in sizes))

    def store_patch(self, copy_id: int, version: PolicyVersion) -> StoredObjects:
        """Have every rank store what it compared last."""
        attempt = _attempt()
        return _joined(attempt, self._orders.ask(RankPublisher.store_patch, copy_id, version, attempt))

    def store_whole(self, copy_id: int, version: PolicyVersion, *, file_name: str = "") -> StoredObjects:
        """Have every rank store its buckets of a copy whole; ``file_name`` is for a copy of one bucket."""
        attempt = _attempt()
        return _joined(attempt, self._orders.ask(RankPublisher.store_whole, copy_id, version, attempt, file_name))

    def store_committed(self, version: PolicyVersion) -> StoredObjects:
        """Have every rank store its buckets of the committed version whole."""
        attempt = _attempt()
        return _joined(attempt, self._orders.ask(RankPublisher.store_committed, version, attempt))

    def commit(self, copy_id: int, *, retain: bool) -> None:
        """Tell every rank that a copy was committed; ``retain`` it for a full snapshot as well."""
        self._orders.ask(RankPublisher.commit, copy_id, retain)

    def store_retained(self, version: PolicyVersion) -> StoredObjects:
        """Have every rank store its retained buckets whole, and release them."""
        attempt = _attempt()
        try:
            return _joined(attempt, self._in_background.ask(RankPublisher.store_retained, version, attempt))
        finally:
            self._in_background.ask(RankPublisher.release)


def _joined(attempt: str, parts: Sequence[StoredBuckets]) -> StoredObjects:
    """Return what all ranks stored; the ranges of each rank index its own objects, and afterwards those of all."""
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


def _attempt() -> str:
    """Return a name for one attempt to store a version, so that no object is ever overwritten."""
    return secrets.token_hex(4)
