"""Encode a bucket's change: not at all, as a sparse segment, or whole.

| codec | stored bytes | when |
|---|---|---|
| `none` | nothing | no bit of the bucket changed |
| `gapabs1` | a `patch_segment` | usually |
| `raw_zstd` | a `raw_segment` | more than `DENSE_ABOVE` of the words changed |
| `safetensors` | a whole file that engines load | full snapshots only; its raw bytes follow `layout.shard_header` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import xxhash

from penstock.protocol.errors import SegmentRefused
from penstock.protocol.weights import patch_segment, raw_segment
from penstock.protocol.weights.bucket_diff import Readable, as_bytes, count_if_dense, difference, num_words_of
from penstock.protocol.weights.patch_segment import Parsed
from penstock.protocol.weights.raw_segment import ParsedRaw

PatchCodec: TypeAlias = Literal["none", "gapabs1", "raw_zstd"]
Codec: TypeAlias = Literal["none", "gapabs1", "raw_zstd", "safetensors"]
Change: TypeAlias = Parsed | ParsedRaw

# Share of changed words above which the whole bucket is sent. Measured on bf16 (`benchmarks/weights/patches.md`): it
# is decoded faster above a third, but is the larger one; at a half the two balance on a network of 10 Gbit/s.
DENSE_ABOVE = 0.5


@dataclass(frozen=True, slots=True)
class Encoded:
    """One bucket's change, ready to be stored; ``data`` is empty for `none`."""

    codec: PatchCodec
    data: bytes
    num_changed: int  # words


def bucket_xxh3(data: Readable) -> str:
    """Return the xxh3-128 of a raw bucket, 32 hex digits: detects accidental changes, at memory speed."""
    return xxhash.xxh3_128_hexdigest(as_bytes(data).data)


def encode(old: Readable, new: Readable, word_bytes: int, *, bucket: int = 0) -> Encoded:
    """Encode what turns ``old`` into ``new`` by the codec that suits the share of changed words.

    Raises ValueError when the sizes differ or are no multiple of ``word_bytes``.
    """
    num_words = num_words_of(new, word_bytes)
    num_changed = count_if_dense(old, new, word_bytes, above=DENSE_ABOVE)
    if num_changed is None:
        patch = difference(old, new, word_bytes)
        num_changed = patch.num_changed
        if num_changed == 0:
            return Encoded("none", b"", 0)
        if num_changed <= DENSE_ABOVE * num_words:
            return Encoded("gapabs1", patch_segment.pack(patch, num_words, bucket=bucket), num_changed)
    segment = raw_segment.encode(new, word_bytes, bucket=bucket, num_changed=num_changed)
    return Encoded("raw_zstd", segment, num_changed)


def parse(codec: str, data: Readable, *, num_words: int, word_bytes: int, bucket: int = 0) -> Change:
    """Verify a stored segment against the bucket it is meant for; raises only SegmentRefused."""
    if codec == "gapabs1":
        return patch_segment.parse(data, num_words=num_words, word_bytes=word_bytes, bucket=bucket)
    if codec == "raw_zstd":
        return raw_segment.parse(data, num_words=num_words, word_bytes=word_bytes, bucket=bucket)
    raise SegmentRefused(f"bucket {bucket}: codec {codec!r} has no segment; supported are gapabs1 and raw_zstd")


def apply(change: Change, target: Readable) -> None:
    """Write a verified change into a bucket, in place; idempotent. Several in order: the later wins.

    Raises ValueError when ``target`` is not writable or of another size; nothing is written then.
    """
    if isinstance(change, Parsed):
        patch_segment.apply(change, target)
    else:
        raw_segment.apply(change, target)


def squash(changes: Sequence[Change]) -> Encoded:
    """Merge the changes of one bucket, oldest first, into one with the same effect.

    Changes before a whole bucket are dropped; changes after it are written into it.
    Raises ValueError when there is none, or they are of different buckets.
    """
    if not changes or len({(c.bucket, c.word_bytes, c.num_words) for c in changes}) != 1:
        raise ValueError("squash needs at least one change, and all of the same bucket")
    whole = [index for index, change in enumerate(changes) if isinstance(change, ParsedRaw)]
    if whole:
        base = changes[whole[-1]]
        state = np.empty(base.num_words * base.word_bytes, np.uint8)
        for change in changes[whole[-1] :]:
            apply(change, state)
        num_changed = min(base.num_words, sum(change.num_changed for change in changes))
        data = raw_segment.encode(state, base.word_bytes, bucket=base.bucket, num_changed=num_changed)
        return Encoded("raw_zstd", data, num_changed)
    data, num_changed = patch_segment.squash([change for change in changes if isinstance(change, Parsed)])
    return Encoded("gapabs1", data, num_changed)
