"""Encode a bucket's change: not at all, as a sparse segment, or whole.

| codec | stored bytes | when |
|---|---|---|
| `none` | nothing | no bit of the bucket changed |
| `gapabs1` | a `patch_segment` | usually |
| `raw_zstd` | a raw segment: the planes (byte p of every word), compressed apart | more than `DENSE_ABOVE` changed |
| `safetensors` | a whole file that engines load | full snapshots only; its raw bytes follow `layout.shard_header` |
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import xxhash
import zstandard

from penstock.protocol.errors import SegmentRefused
from penstock.protocol.weights import patch_segment
from penstock.protocol.weights.patch_segment import (
    Bytes,
    Difference,
    Parsed,
    Readable,
    as_bytes,
    difference,
    num_words_of,
    read_frame,
    writable,
)

PatchCodec: TypeAlias = Literal["none", "gapabs1", "raw_zstd"]
Codec: TypeAlias = Literal["none", "gapabs1", "raw_zstd", "safetensors"]

# Share of changed words above which the whole bucket is sent. Measured on bf16 (`benchmarks/weights/patches.md`): it
# is decoded faster above a third, but is the larger one; at a half the two balance on a network of 10 Gbit/s.
DENSE_ABOVE = 0.5
RAW_MAGIC = b"RAW1"
_RAW_HEADER = struct.Struct("<4sB3xIIQQ")  # magic, word_bytes, bucket, zero, n_words, n_changed
_FRAME_LENGTH = struct.Struct("<Q")
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class ParsedRaw:
    """A verified raw segment; ``planes`` are uint8 [num_words] each, lowest byte of the word first."""

    word_bytes: int
    num_words: int
    planes: tuple[Bytes, ...]


Change: TypeAlias = Parsed | ParsedRaw


@dataclass(frozen=True, slots=True)
class Encoded:
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
    changes, num_words = difference(old, new, word_bytes), num_words_of(new, word_bytes)
    return encode_difference(changes, num_words, lambda: new, bucket=bucket)


def encode_difference(changes: Difference, num_words: int, new: Callable[[], Readable], *, bucket: int = 0) -> Encoded:
    """Encode as `encode` does what is known to have changed; ``new`` gives the bucket, where most of it changed."""
    if changes.num_changed == 0:
        return Encoded("none", b"", 0)
    if changes.num_changed <= DENSE_ABOVE * num_words:
        return Encoded("gapabs1", patch_segment.pack(changes, num_words, bucket=bucket), changes.num_changed)
    whole = encode_whole(new(), len(changes.planes), bucket=bucket, num_changed=changes.num_changed)
    return Encoded("raw_zstd", whole, changes.num_changed)


def parse(codec: str, data: Readable, *, num_words: int, word_bytes: int, bucket: int = 0) -> Change:
    if codec == "gapabs1":
        return patch_segment.parse(data, num_words=num_words, word_bytes=word_bytes, bucket=bucket)
    if codec == "raw_zstd":
        return parse_whole(data, num_words=num_words, word_bytes=word_bytes, bucket=bucket)
    raise SegmentRefused(f"bucket {bucket}: codec {codec!r} has no segment; supported are gapabs1 and raw_zstd")


def apply(change: Change, target: Readable) -> None:
    """Write a verified change into a bucket, in place; idempotent. Several in order: the later wins.

    Raises ValueError when ``target`` is not writable or of another size; nothing is written then.
    """
    if isinstance(change, Parsed):
        patch_segment.apply(change, target)
        return
    view = writable(target, change.num_words * change.word_bytes)
    for number, plane in enumerate(change.planes):
        view[number :: change.word_bytes] = plane


def encode_whole(new: Readable, word_bytes: int, *, bucket: int = 0, num_changed: int) -> bytes:
    """Encode the bucket as it is now; raises ValueError when its size is not a multiple of ``word_bytes``."""
    data = as_bytes(new)
    num_words = num_words_of(data, word_bytes)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    planes = (np.ascontiguousarray(data[number::word_bytes]) for number in range(word_bytes))
    frames = [compressor.compress(plane.data) if plane.size else b"" for plane in planes]
    header = _RAW_HEADER.pack(RAW_MAGIC, word_bytes, bucket, 0, num_words, num_changed)
    return b"".join([header, *(_FRAME_LENGTH.pack(len(frame)) for frame in frames), *frames])


def parse_whole(segment: Readable, *, num_words: int, word_bytes: int, bucket: int = 0) -> ParsedRaw:
    """Verify a segment against the bucket it is meant for, and decompress it; raises SegmentRefused only.

    Memory stays below twice the bucket, for any segment.
    """
    data = as_bytes(segment).data
    offset = _RAW_HEADER.size + word_bytes * _FRAME_LENGTH.size
    if len(data) < offset:
        raise SegmentRefused(f"segment: {len(data)} bytes are too few for a header")
    *header, num_changed = _RAW_HEADER.unpack_from(data)
    expected = [RAW_MAGIC, word_bytes, bucket, 0, num_words]
    if header != expected or num_changed > num_words:
        raise SegmentRefused(
            f"segment: magic, word bytes, bucket, zero, words are {header} with {num_changed} words changed, "
            f"expected {expected}"
        )
    lengths = struct.unpack_from(f"<{word_bytes}Q", data, _RAW_HEADER.size)
    if offset + sum(lengths) != len(data):
        raise SegmentRefused(f"segment: has {len(data)} bytes, its header says {offset + sum(lengths)}")
    decompressor = zstandard.ZstdDecompressor()
    planes = []
    for length in lengths:
        planes.append(read_frame(decompressor, data[offset : offset + length], num_words))
        offset += length
    return ParsedRaw(word_bytes, num_words, tuple(planes))
