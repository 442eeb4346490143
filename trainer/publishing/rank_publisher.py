"""What one rank does for a publication: compares, encodes and stores its own buckets. Rank 0 asks (`all_shares`).

Each rank holds two things: the *base*, its part of the version that the head names, and the parts that wait to be
published. Nothing of it changes before rank 0 says that a version is committed, so a publication that fails
has changed nothing here, and what it stored is named by no manifest.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping

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
from penstock.trainer.publishing.weight_buckets import Part, read_part, split

_PART_DEADLINE_S = 600.0  # a rank that is that far behind rank 0 has its own trouble


class Digests(Wire):
    """Answer: every tensor of a rank's part, as [name, dtype, shape, xxh3]."""

    tensors: tuple[tuple[str, str, tuple[Count, ...], str], ...] = ()
    problem: str | None = None  # why there are none

    @classmethod
    def of(cls, part: Part) -> Digests:
        """Wait for the hashes of a part."""
        return cls(tensors=tuple((d.name, d.dtype, d.shape, d.xxh3) for d in part.digests()))

    def unwrap(self) -> list[TensorDigest]:
        """Return what `weights_digest` takes."""
        return [TensorDigest(*tensor) for tensor in self.tensors]


class Compared(Wire):
    """Answer: what the patch of a rank's buckets comes to."""

    num_bytes: Count
    num_changed: Count  # words


class Stored(Wire):
    """Answer: what a rank has stored of a version; ranges count within these ``objects``."""

    objects: tuple[BlobRef, ...] = ()
    numbers: tuple[Count, ...] = ()  # of the buckets, as many as ``states``
    states: tuple[BucketState, ...] = ()


class Done(Wire):
    """Answer: it is so."""


class Question(Wire):
    """What rank 0 wants of every rank."""

    what: str
    taken: Count = 0  # which copy of the weights
    version: Count = 0
    attempt: str = ""
    name: str = ""  # of the file, where there is one only
    head: BlobRef | None = None
    of_base: bool = False  # of what is committed, not of a part that waits
    keep: bool = False  # of or for what is kept for an anchor beside the version


class Share:
    """The buckets of one rank. Thread-safe: copies come from the training thread, questions on others."""

    def __init__(self, blobs: Blobs, run_id: str, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Begin with nothing."""
        self._blobs, self._run_id = blobs, run_id
        self._rank, self._num_ranks = rank, num_ranks
        self._parts: dict[int, Part] = {}
        self._lasting: dict[int, Part] = {}  # the models that adapters sit upon
        self._base: Part | None = None
        self._kept: Part | None = None  # what an anchor is being written from
        self._changes: dict[int, Encoded] = {}  # of the part that was compared last, by bucket
        self._changed = threading.Condition()

    def hold(self, part: Part, *, for_good: bool = False) -> None:
        """Take a part that may be published, or that may be asked for again and again."""
        with self._changed:
            (self._lasting if for_good else self._parts)[part.taken] = part
            self._changed.notify_all()

    def discard(self, wanted: Collection[int]) -> None:
        """Let go of parts that will not be published."""
        with self._changed:
            self._parts = {taken: part for taken, part in self._parts.items() if taken in wanted}

    def answer(self, question: Question) -> Wire:
        """Do what rank 0 asks; raises the errors of the object store."""
        return _ANSWERS[question.what](self, question)

    def _digests(self, question: Question) -> Digests:
        return Digests.of(self._part(question.taken))

    def _read_head(self, question: Question) -> Digests:
        """Put this rank's buckets of a version together from the store, and make them the base."""
        assert question.head is not None
        reader = WeightReader(self._blobs, self._run_id)
        try:
            manifest = reader.manifest(question.head, PolicyVersion(question.version))
            numbers = split(reader.layout(manifest), self._num_ranks)[self._rank]
            self._base = read_part(reader.plan(manifest, None), reader, numbers)
        except UNUSABLE as err:
            self._base = None
            return Digests(problem=str(err))
        return Digests.of(self._base)

    def _compare(self, question: Question) -> Compared:
        part, base = self._part(question.taken), self._base
        assert base is not None
        self._changes = {}
        for number, raw in part.raw.items():
            word_bytes = part.layout.buckets[number].word_bytes
            self._changes[number] = encoded = bucket_codec.encode(base.raw[number], raw, word_bytes, bucket=number)
            part.know_xxh3(number, base.xxh3(number) if encoded.codec == "none" else None)
        found = self._changes.values()
        return Compared(num_bytes=sum(len(e.data) for e in found), num_changed=sum(e.num_changed for e in found))

    def _store_changes(self, question: Question) -> Stored:
        """Store the segments that were compared last, in one object."""
        part, base = self._part(question.taken), self._base
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
                    num_words=part.layout.buckets[number].num_words,
                    num_changed=encoded.num_changed,
                    base_xxh3=base.xxh3(number),
                    new_xxh3=part.xxh3(number),
                )
            )
        objects: tuple[BlobRef, ...] = ()
        if offset:
            key = blob_keys.weights_pack(self._run_id, PolicyVersion(question.version), question.attempt, self._rank)
            objects = (self._put(key, b"".join(encoded.data for encoded in self._changes.values())),)
        return Stored(objects=objects, numbers=tuple(self._changes), states=tuple(states))

    def _store_whole(self, question: Question) -> Stored:
        """Store every bucket as a safetensors file."""
        part = self._base if question.of_base else self._kept if question.keep else self._part(question.taken)
        assert part is not None
        objects, states = [], []
        for number, raw in part.raw.items():
            bucket = part.layout.buckets[number]
            name = question.name or shard_name(number, len(part.layout.buckets))
            key = blob_keys.weights_shard(self._run_id, PolicyVersion(question.version), question.attempt, name)
            blob = self._put(key, shard_header(bucket) + raw.tobytes())
            stored = StoredRange(object=len(objects), offset=0, size_bytes=blob.size_bytes, sha256=blob.sha256)
            objects.append(blob)
            states.append(
                BucketState(
                    codec="safetensors",
                    stored=stored,
                    num_words=bucket.num_words,
                    num_changed=bucket.num_words,
                    new_xxh3=part.xxh3(number),
                )
            )
        return Stored(objects=tuple(objects), numbers=tuple(part.raw), states=tuple(states))

    def _settle(self, question: Question) -> Done:
        """A part was committed: the next patch is made against it."""
        self._base = part = self._part(question.taken)
        self._changes = {}
        if question.keep:
            self._kept = part
        with self._changed:
            self._parts.pop(question.taken, None)
        return Done()

    def _release(self, _: Question) -> Done:
        """The anchor beside a version is written, or given up."""
        self._kept = None
        return Done()

    def _put(self, key: str, data: bytes) -> BlobRef:
        reference = self._blobs.put(key, data)
        crash_points.reach(CrashPoint.OBJECT_STORED)
        return reference

    def _part(self, taken: int) -> Part:
        """Return a part; this rank may still be copying what rank 0 has copied already."""
        with self._changed:
            if not self._changed.wait_for(lambda: taken in self._parts or taken in self._lasting, _PART_DEADLINE_S):
                raise PublicationFailed(
                    f"copy {taken} of the weights was not made within {_PART_DEADLINE_S:.0f} s; the training of this "
                    "rank has not come so far"
                )
            return self._parts[taken] if taken in self._parts else self._lasting[taken]


_ANSWERS: Mapping[str, Callable[[Share, Question], Wire]] = {
    "digests": Share._digests,
    "read_head": Share._read_head,
    "compare": Share._compare,
    "store_changes": Share._store_changes,
    "store_whole": Share._store_whole,
    "settle": Share._settle,
    "release": Share._release,
}
