"""The last committed version's bytes, bucket by bucket: what the next version is compared with.

One copy of the model, and room for one bucket beside it. What changed is written into the copy only
when the version that carries it is committed; until then a failed publication has changed nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol import bucket_codec
from protocol.bucket_codec import Encoded, bucket_xxh3
from protocol.patch_segment import Bytes
from protocol.weight_chain import CatchUp
from protocol.weight_layout import BUCKET_BYTES, Bucket, TensorSpec, WeightLayout, bucket_digests, build_layout
from protocol.weight_reader import WeightReader, for_buckets
from protocol.weights_digest import TensorDigest, weights_digest


@dataclass(frozen=True, slots=True)
class BucketDifference:
    """What became of one bucket."""

    encoded: Encoded
    base_xxh3: str
    new_xxh3: str
    digests: list[TensorDigest]


@dataclass(frozen=True, slots=True)
class Difference:
    """What turns the committed version into the next one."""

    buckets: list[BucketDifference]

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(len(bucket.encoded.data) for bucket in self.buckets)

    def density(self, layout: WeightLayout) -> float:
        """Share of the values whose bits changed."""
        return sum(bucket.encoded.num_changed for bucket in self.buckets) / max(layout.num_words, 1)

    @property
    def state_root(self) -> str:
        """Root of the next version."""
        return weights_digest(digest for bucket in self.buckets for digest in bucket.digests)


class CommittedWeights:
    """The bytes of one version in a layout. Used by one thread."""

    def __init__(self, layout: WeightLayout, raw: list[Bytes]) -> None:
        """Take the buckets' bytes over."""
        self.layout = layout
        self.raw = raw
        self._xxh3 = [bucket_xxh3(bucket) for bucket in raw]
        self._digests = [bucket_digests(b, r.data) for b, r in zip(layout.buckets, raw, strict=True)]

    @classmethod
    def copy_of(cls, layout: WeightLayout, tensors: Mapping[str, Tensor]) -> CommittedWeights:
        """Copy a snapshot."""
        return cls(layout, [gather(bucket, tensors) for bucket in layout.buckets])

    @classmethod
    def read(cls, plan: CatchUp, reader: WeightReader) -> CommittedWeights:
        """Put a version together from its anchor and chain; raises one of `weight_reader.UNUSABLE`."""
        layout = reader.layout(plan.target)
        raw = [np.zeros(bucket.num_bytes, np.uint8) for bucket in layout.buckets]
        for_buckets(range(len(raw)), lambda number: reader.bring(plan, number, raw[number]))
        return cls(layout, raw)

    @property
    def state_root(self) -> str:
        """Root of what is held."""
        return weights_digest(digest for bucket in self._digests for digest in bucket)

    @property
    def xxh3(self) -> list[str]:
        """The xxh3-128 of every raw bucket."""
        return self._xxh3

    def compare(self, tensors: Mapping[str, Tensor]) -> Difference:
        """Encode what a snapshot of the same layout changes; nothing is changed here."""
        found = []
        for number, bucket in enumerate(self.layout.buckets):
            new = gather(bucket, tensors)
            encoded = bucket_codec.encode(self.raw[number], new, bucket.word_bytes, bucket=number)
            base = self._xxh3[number]
            if encoded.codec == "none":
                found.append(BucketDifference(encoded, base, base, self._digests[number]))
            else:
                digests = bucket_digests(bucket, new.data)
                found.append(BucketDifference(encoded, base, bucket_xxh3(new), digests))
        return Difference(found)

    def promote(self, difference: Difference) -> None:
        """Become the version that was just committed, through the segments that everybody else applies."""
        for number, change in enumerate(difference.buckets):
            if change.encoded.codec != "none":
                bucket = self.layout.buckets[number]
                parsed = bucket_codec.parse(
                    change.encoded.codec,
                    change.encoded.data,
                    num_words=bucket.num_words,
                    word_bytes=bucket.word_bytes,
                    bucket=number,
                )
                bucket_codec.apply(parsed, self.raw[number])
                self._xxh3[number] = change.new_xxh3
                self._digests[number] = change.digests


def layout_of(tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
    """Lay a snapshot out."""
    return build_layout(
        [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()],
        bucket_bytes=bucket_bytes,
    )


def gather(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Bytes:
    """Copy a bucket's tensors one after another; returns its raw bytes."""
    raw = np.empty(bucket.num_bytes, np.uint8)
    for placed in bucket.tensors:
        data = tensors[placed.name].reshape(-1).view(torch.uint8).numpy()
        raw[placed.byte_offset : placed.byte_offset + placed.num_bytes] = data
    return raw
