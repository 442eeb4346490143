"""The `raw_zstd` segment: a whole bucket, for when most of its words changed.

The planes (byte p of every word) are compressed separately: exponents repeat, mantissas do not.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import zstandard

from penstock.protocol.errors import SegmentRefused
from penstock.protocol.weights.bucket_diff import Bytes, Readable, as_bytes, num_words_of
from penstock.protocol.weights.patch_segment import read_frame

MAGIC = b"RAW1"
_HEADER = struct.Struct("<4sB3xIIQQ")  # magic, word_bytes, bucket, zero, n_words, n_changed
_LENGTH = struct.Struct("<Q")
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class ParsedRaw:
    """A verified raw segment; ``planes`` are uint8 [num_words] each, lowest byte of the word first."""

    bucket: int
    word_bytes: int
    num_words: int
    num_changed: int  # words
    planes: tuple[Bytes, ...]


def encode(new: Readable, word_bytes: int, *, bucket: int = 0, num_changed: int) -> bytes:
    """Encode the bucket as it is now; raises ValueError when its size is not a multiple of ``word_bytes``."""
    data = as_bytes(new)
    num_words = num_words_of(data, word_bytes)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    planes = (np.ascontiguousarray(data[number::word_bytes]) for number in range(word_bytes))
    frames = [compressor.compress(plane.data) if plane.size else b"" for plane in planes]
    header = _HEADER.pack(MAGIC, word_bytes, bucket, 0, num_words, num_changed)
    return b"".join([header, *(_LENGTH.pack(len(frame)) for frame in frames), *frames])


def parse(segment: Readable, *, num_words: int, word_bytes: int, bucket: int = 0) -> ParsedRaw:
    """Verify a segment against the bucket it is meant for, and decompress it; raises SegmentRefused only.

    Memory stays below twice the bucket, for any segment.
    """
    data = as_bytes(segment).data
    offset = _HEADER.size + word_bytes * _LENGTH.size
    if len(data) < offset:
        raise SegmentRefused(f"segment: {len(data)} bytes are too few for a header")
    *found, num_changed = _HEADER.unpack_from(data)
    expected = [MAGIC, word_bytes, bucket, 0, num_words]
    if found != expected or num_changed > num_words:
        raise SegmentRefused(
            f"segment: magic, word bytes, bucket, zero, words are {found} with {num_changed} words changed, "
            f"expected {expected}"
        )
    lengths = [_LENGTH.unpack_from(data, _HEADER.size + plane * _LENGTH.size)[0] for plane in range(word_bytes)]
    if offset + sum(lengths) != len(data):
        raise SegmentRefused(f"segment: has {len(data)} bytes, its header says {offset + sum(lengths)}")
    decompressor = zstandard.ZstdDecompressor()
    planes = []
    for length in lengths:
        planes.append(read_frame(decompressor, data[offset : offset + length], num_words))
        offset += length
    return ParsedRaw(bucket, word_bytes, num_words, num_changed, tuple(planes))


def apply(parsed: ParsedRaw, target: Readable) -> None:
    """Overwrite a bucket, in place.

    Raises ValueError when ``target`` is not writable or not of the segment's size; nothing is written then.
    """
    view = as_bytes(target)
    expected = parsed.num_words * parsed.word_bytes
    if view.size != expected or not view.flags.writeable:
        raise ValueError(f"target: a writable buffer of {expected} bytes is needed, got {view.size} bytes")
    for number, plane in enumerate(parsed.planes):
        view[number :: parsed.word_bytes] = plane
