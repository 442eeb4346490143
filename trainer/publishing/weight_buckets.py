"""Some or all buckets of one version, each as the contiguous bytes that are published.

A model is copied straight into its buckets once. From then on only what changed is written to them, and what was there is kept beside.

A `Snapshot` is what the training thread submits: the weights of one version on the CPU, as they were when the step ended. A run that publishes
adapters submits the low-rank factors alone, complete on rank 0; the model that they are applied to, their base, is published once.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.adapter_format import AdapterConfig, adapter_digest
from penstock.protocol.weights.bucket_codec import Encoded
from penstock.protocol.weights.layout import (
    BUCKET_BYTES,
    PlacedTensor,
    TensorDigest,
    TensorSpec,
    WeightLayout,
    build_layout,
    hash_bucket,
    weights_digest,
)
from penstock.protocol.weights.manifest_chain import CatchUp
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import WeightReader, for_buckets
from penstock.trainer.publishing.changed_words import ChangedPiece, ChangedWords, as_words

T = TypeVar("T")


class TensorSink(Protocol):
    @property
    def names(self) -> Collection[str]: ...

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor; it changes afterwards."""
        ...


class WeightBuckets:
    """Buckets ``numbers`` of one version of a layout. A whole copy is written by one thread, then sealed, then read by any.

    A `successor` shares the memory of the version before, whose changed words it overwrites. Each version keeps the words that the next one
    replaced, as long as anybody holds it, so `words`, and what changed since an earlier version, can be had of every version that is held.
    """

    def __init__(self, layout: WeightLayout, numbers: Iterable[int], *, copy_id: int = 0, pinned: bool = False) -> None:
        """``pinned`` is host memory that a CUDA device reads and writes by itself."""
        self.layout, self.copy_id = layout, copy_id
        self.raw: dict[int, Bytes] = {n: _empty(layout.buckets[n].num_bytes, pinned) for n in numbers}  # of the newest
        self._places = {t.name: (n, t) for n in self.raw for t in layout.buckets[n].tensors}
        self._names = [tensor.name for _, _, tensor in layout.placed()]
        self._lock = threading.RLock()  # of all that share the memory
        self._next: WeightBuckets | None = None
        # What `_next` replaced in a bucket: the words that it changed, or all of them where it changed many.
        self._replaced: dict[int, ChangedWords | Bytes] = {}
        self._written: Future[None] | None = None  # None: when it is hashed
        self._digests: Future[list[TensorDigest]] | None = None
        self._xxh3: dict[int, str] = {}

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a whole tensor to its place, rounded to the layout's dtype on the tensor's device."""
        place, source = self._place(name), tensor.detach()
        if source.device.type != "cpu":
            source = source.to(place.dtype)  # so that only the smaller copy is transferred
        place.copy_(source)

    def seal(self, thread: Executor | None = None, copied: Future[None] | None = None) -> None:
        """Hash the copy, in a thread; one that could not be ``copied`` whole has no digests, and so it is not published."""
        tensors = {n: self.layout.buckets[n].tensors for n in self.raw}

        def hash_copy() -> list[TensorDigest]:
            if copied is not None:
                copied.result()
            return self._hash(tensors, [])

        self._digests = _submit(thread, hash_copy)

    def successor(self, changed_pieces: Future[list[ChangedPiece]], thread: Executor, *, copy_id: int) -> WeightBuckets:
        """Return the next version, which ``thread`` writes and hashes when its ``changed_pieces`` are known."""
        after = copy.copy(self)
        after.copy_id, after._next, after._replaced, after._xxh3 = copy_id, None, {}, {}
        after._written, after._digests = written, hashed = Future(), Future()

        def follow() -> None:
            try:
                self._overwrite(after, changed_pieces.result())
                written.set_result(None)
                hashed.set_result(after._hash_changed(self, changed_pieces.result()))
            except BaseException as err:  # noqa: BLE001  who waits for them raises it
                for future in (written, hashed):
                    if not future.done():
                        future.set_exception(err)

        thread.submit(follow)
        return after

    @property
    def hashed(self) -> Future[list[TensorDigest]]:
        assert self._digests is not None, "buckets are sealed before they are read"
        return self._digests

    def digests(self) -> list[TensorDigest]:
        return self.hashed.result()

    def xxh3(self, number: int) -> str:
        self.digests()
        return self._xxh3[number]

    def words(self, number: int) -> Bytes:
        """Return a copy of a bucket as it is in this version."""
        self.wait_until_written()
        with self._lock:
            raw = self.raw[number].copy()
            for replaced in reversed(self._changes(None, number)):
                if isinstance(replaced, ChangedWords):
                    raw.view(replaced.before.dtype)[replaced.positions] = replaced.before
                else:
                    raw = replaced.copy()
        return raw

    def encoded_since(self, base: WeightBuckets, number: int) -> Encoded:
        """Encode what turns a bucket of ``base`` into this version's."""
        self.wait_until_written()
        word_bytes = self.layout.buckets[number].word_bytes
        changes: list[ChangedWords | Bytes] | None = None
        if base.raw is self.raw:
            with self._lock:
                changes = base._changes(self, number)
        if changes is not None and all(isinstance(change, ChangedWords) for change in changes):
            if not changes:
                return Encoded("none", b"", 0)
            difference = functools.reduce(ChangedWords.followed_by, changes).difference()  # type: ignore[arg-type]
            num_words = self.layout.buckets[number].num_words
            return bucket_codec.encode_difference(difference, num_words, lambda: self.words(number), bucket=number)
        return bucket_codec.encode(base.words(number), self.words(number), word_bytes, bucket=number)

    def forget(self, wanted: Collection[int], *, before: int) -> None:
        """Forget the versions after this one with copy ids below ``before`` that are not ``wanted``: what they changed counts to the next.

        One thread at a time.
        """
        version = self
        while (after := version._next) is not None and (following := after._next) is not None:
            if after.copy_id >= before or not (after.hashed.done() and following.hashed.done()):
                return
            if after.copy_id in wanted:
                version = after
                continue
            both = {number: version._replaced_with(number, replaced) for number, replaced in after._replaced.items()}
            with self._lock:
                version._replaced.update(both)
                version._next = following

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as views of the buckets; they must not be written to."""
        return {name: self._place(name) for name in self._places}

    def word_place(self, tensor: int) -> Tensor:
        """Return the words [n] of the tensor of this number, as they are in the newest version: a view."""
        place = self._place(self._names[tensor])
        return as_words(place, place.dtype)

    def _place(self, name: str) -> Tensor:
        number, placed = self._places[name]
        raw = torch.from_numpy(self.raw[number])[placed.byte_offset : placed.byte_offset + placed.num_bytes]
        return raw.view(getattr(torch, self.layout.buckets[number].dtype)).view(placed.shape)

    def wait_until_written(self) -> None:
        (self.hashed if self._written is None else self._written).result()

    def _changes(self, until: WeightBuckets | None, number: int) -> list[ChangedWords | Bytes]:
        """Return what replaced words of a bucket from this version on, oldest first; None: up to the newest."""
        version, changes = self, []
        while version is not until and version._next is not None:
            if number in version._replaced:
                changes.append(version._replaced[number])
            version = version._next
        assert until is None or version is until, "a version that is compared is held"
        return changes

    def _replaced_with(self, number: int, later: ChangedWords | Bytes) -> ChangedWords | Bytes:
        earlier = self._replaced.get(number)
        if not isinstance(earlier, ChangedWords):
            return later if earlier is None else earlier
        both = earlier.followed_by(later) if isinstance(later, ChangedWords) else None
        if both is not None and both.nbytes <= self.raw[number].size:
            return both
        return self.words(number)

    def _overwrite(self, after: WeightBuckets, changed_pieces: list[ChangedPiece]) -> None:
        """Write what the next version changed, and keep what was there."""
        self.digests()
        with self._lock:
            self._next = after
        placed = list(self.layout.placed())
        by_bucket: dict[int, list[ChangedPiece]] = {}
        for piece in changed_pieces:
            by_bucket.setdefault(placed[piece.tensor][0], []).append(piece)
        for number, pieces in by_bucket.items():
            words = torch.from_numpy(self.raw[number]).view(pieces[0].words.dtype)
            first = {piece: placed[piece.tensor][2].byte_offset // words.itemsize + piece.start for piece in pieces}
            pieces.sort(key=first.__getitem__)
            positions = torch.cat([piece.positions_from(first[piece]) for piece in pieces])
            known = [piece.before for piece in pieces if piece.before is not None]
            before = torch.cat(known) if len(known) == len(pieces) else words.index_select(0, positions)
            changed_to = torch.cat([piece.words for piece in pieces])
            written = ChangedWords(positions.numpy(), before.numpy(), changed_to.numpy())
            changed = written.without_unchanged()  # of a part that changed in many places all words are written
            with self._lock:  # torch writes in as many threads as it has, and lets others run
                self._replaced[number] = changed if changed.nbytes <= words.nbytes else self.raw[number].copy()
                words[positions] = changed_to

    def _hash(self, changed: Mapping[int, Iterable[PlacedTensor]], known: Iterable[TensorDigest]) -> list[TensorDigest]:
        digests = {digest.name: digest for digest in known}
        for number, tensors in changed.items():
            hashes = hash_bucket(self.layout.buckets[number], self.raw[number].data, tensors)
            digests |= {digest.name: digest for digest in hashes.digests}
            self._xxh3[number] = hashes.xxh3
        return [digests[name] for name in self._places]

    def _hash_changed(self, previous: WeightBuckets, changed_pieces: list[ChangedPiece]) -> list[TensorDigest]:
        placed = list(self.layout.placed())
        changed: dict[int, dict[str, PlacedTensor]] = {}
        for number, _, tensor in (placed[piece.tensor] for piece in changed_pieces):
            changed.setdefault(number, {})[tensor.name] = tensor
        self._xxh3 = dict(previous._xxh3)
        return self._hash({number: tensors.values() for number, tensors in changed.items()}, previous.digests())


def _empty(num_bytes: int, pinned: bool) -> Bytes:
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return np.empty(num_bytes, np.uint8)


def _submit(thread: Executor | None, call: Callable[[], T]) -> Future[T]:
    if thread is not None:
        return thread.submit(call)
    pool = ThreadPoolExecutor(1, "digest")
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def assign_buckets(layout: WeightLayout, num_shares: int) -> list[list[int]]:
    """Return the bucket numbers of each share, as equal in bytes as whole buckets allow.

    The largest bucket goes first, to the share with the fewest bytes. Depends on nothing but the layout, so every
    rank computes the same result.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    filled = [0] * num_shares
    for number in sorted(range(len(layout.buckets)), key=lambda n: (-layout.buckets[n].num_bytes, n)):
        index = min(range(num_shares), key=lambda i: (filled[i], i))
        shares[index].append(number)
        filled[index] += layout.buckets[number].num_bytes
    return [sorted(share) for share in shares]


def layout_of(tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
    return build_layout(
        [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()],
        bucket_bytes=bucket_bytes,
    )


def copy_to_buckets(
    tensors: Mapping[str, Tensor], *, copy_id: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> WeightBuckets:
    layout = layout_of(tensors, bucket_bytes)
    buckets = WeightBuckets(layout, range(len(layout.buckets)), copy_id=copy_id)
    for name, tensor in tensors.items():
        buckets.put(name, tensor)
    buckets.seal()
    return buckets


def read_buckets(plan: CatchUp, reader: WeightReader, numbers: Iterable[int] | None = None) -> WeightBuckets:
    """Read buckets of a version, by default all; raises one of `version_reader.UNUSABLE`, and BlobStoreUnreachable."""
    layout = reader.layout(plan.target)
    buckets = WeightBuckets(layout, range(len(layout.buckets)) if numbers is None else numbers)
    for raw in buckets.raw.values():
        raw[:] = 0
    if buckets.raw:
        for_buckets(list(buckets.raw), lambda number: reader.bring(plan, number, buckets.raw[number]))
    buckets.seal()
    return buckets


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that a run's adapters are applied to, as it is published: this rank's buckets of it."""

    buckets: WeightBuckets
    config: AdapterConfig  # the same for all adapters of a run
    root: str  # the `weights_digest` over all ranks' buckets


@dataclass(frozen=True, slots=True)
class ModelWeights:
    buckets: WeightBuckets
    all_ranks_root: Callable[[], str] | None = None  # root over all ranks' buckets; None if all are here

    def root_later(self) -> Callable[[], str]:
        if self.all_ranks_root is not None:
            return self.all_ranks_root
        hashed = self.buckets.hashed
        return lambda: weights_digest(hashed.result())

    def root(self) -> str:
        return self.root_later()()


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter to publish: its factors in one bucket, and the base that it is applied to."""

    buckets: WeightBuckets
    base: AdapterBase

    @classmethod
    def of(cls, factors: Mapping[str, Tensor], base: AdapterBase, *, copy_id: int = 0) -> AdapterWeights:
        return cls(copy_to_buckets(factors, copy_id=copy_id, bucket_bytes=sys.maxsize), base)

    def root_later(self) -> Callable[[], str]:
        hashed, base = self.buckets.hashed, self.base
        config = hashlib.sha256(base.config.to_json()).hexdigest()
        return lambda: adapter_digest(base.root, config, hashed.result())

    def root(self) -> str:
        return self.root_later()()


Weights = ModelWeights | AdapterWeights
W = TypeVar("W", ModelWeights, AdapterWeights, Weights)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[W]):
    version: PolicyVersion
    step: int
    weights: W
    dtype: str
    must_publish: bool = False  # never skipped: an evaluation needs this version, or it is the last
