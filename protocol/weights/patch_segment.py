"""Find the words that differ between two states of a bucket, and store their changed bytes: the `gapabs1` segment.

A bucket is an array of words (1 byte: fp8, 2: bf16 and fp16, 4: fp32, 8: int64). Each byte of the word is a separate *plane*: plane p of a
bucket is the bytes ``p, p + word_bytes, p + 2 * word_bytes, ...``. A segment holds, for every plane, the word indices whose byte changed, as
u16 gaps, and the new bytes. An optimizer step moves most bf16 words by one unit in the last place, so the upper plane is almost empty: 8 bits
of value for each changed word in place of 16.

New bytes are absolute. So a segment may be applied twice, over a half-written mirror, or merged with a later one by "later wins", with the
same result; a difference (XOR, ulp) would corrupt the bucket. The byte table is in `protocol/README.md`. A segment is not trusted: `parse`
checks every field, size and index before it returns, and only a parsed segment can be applied.

The search runs at nearly memory speed: eight bytes are compared at once, then the results eight at once, and only blocks that differ are
examined. Comparison is by bits: -0, NaN payloads and denormals are plain bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from penstock.protocol.errors import SegmentRefused

Bytes: TypeAlias = NDArray[np.uint8]
Readable: TypeAlias = bytes | bytearray | memoryview | np.ndarray

WORD_BYTES = (1, 2, 4, 8)
_WORDS = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_COMPARED = 1 << 17  # eight-byte words compared at once; smaller blocks need more calls, larger ones exceed the cache
MAGIC = b"GAB1"
FILLER = 65535  # a gap entry of this value advances so many words and carries no value
_HEADER = struct.Struct("<4sB3xIIQQ")  # magic, word_bytes, bucket, zero, n_words, n_changed
_PLANE = struct.Struct("<QQQQQ")  # n_values, n_gaps, bytes of the frames: gaps low, gaps high, values
_LEVEL = 1  # zstd; level 3 is not smaller on this data
_BLOCK = 1 << 15  # values applied at once: their int64 indices stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Changes:
    """One plane (byte p of every word): int64 ``indices`` [n] of words, strictly increasing, and new bytes uint8 [n]."""

    indices: NDArray[np.int64]
    values: Bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """All changes: one `Changes` for each byte of the word, lowest first; ``num_changed`` counts words."""

    planes: tuple[Changes, ...]
    num_changed: int


def as_bytes(data: Readable) -> Bytes:
    if not isinstance(data, np.ndarray):
        return np.frombuffer(data, dtype=np.uint8)
    if not data.flags.c_contiguous:
        raise ValueError(f"array of shape {data.shape} and strides {data.strides} is not contiguous")
    return data.reshape(-1).view(np.uint8)


def writable(target: Readable, expected: int) -> Bytes:
    view = as_bytes(target)
    if view.size != expected or not view.flags.writeable:
        raise ValueError(f"target: a writable buffer of {expected} bytes is needed, got {view.size} bytes")
    return view


def num_words_of(data: Readable, word_bytes: int) -> int:
    size = as_bytes(data).size
    if word_bytes not in WORD_BYTES or size % word_bytes:
        raise ValueError(f"{size} bytes are not a multiple of {word_bytes}; words have {WORD_BYTES} bytes")
    return size // word_bytes


def difference(old: Readable, new: Readable, word_bytes: int) -> Difference:
    """Return the words that differ, with the changed bytes of ``new``.

    Raises ValueError when the sizes differ or are no multiple of ``word_bytes``.
    """
    before, after = as_bytes(old), as_bytes(new)
    num_words_of(new, word_bytes)
    if before.size != after.size:
        raise ValueError(f"old has {before.size} bytes, new {after.size}; a patch needs the same layout on both sides")
    return changed_planes(*changed_words(before.view(_WORDS[word_bytes]), after.view(_WORDS[word_bytes])))


def changed_planes(indices: NDArray[np.int64], deltas: np.ndarray, words: np.ndarray) -> Difference:
    """Return the changed bytes of new ``words`` [n] at ``indices`` that increase; ``deltas`` are old XOR new, none of them 0."""
    planes = []
    for number in range(words.itemsize):
        now, delta = ((array >> (8 * number)).astype(np.uint8) for array in (words, deltas))
        if np.count_nonzero(delta) == delta.size:
            planes.append(Changes(indices, now))
        else:
            chosen = (delta != 0).nonzero()[0]
            planes.append(Changes(indices[chosen], now[chosen]))
    return Difference(tuple(planes), indices.size)


def changed_words(old: np.ndarray, new: np.ndarray) -> tuple[NDArray[np.int64], np.ndarray, np.ndarray]:
    """Return where two arrays of as many integers differ, ``old ^ new`` there, and the words of ``new``."""
    before, after, per_eight = as_bytes(old), as_bytes(new), 8 // new.itemsize
    whole, shift, parts = before.size // 8, per_eight.bit_length() - 1, []
    before_64, after_64 = before[: 8 * whole].view(np.uint64), after[: 8 * whole].view(np.uint64)
    for start in range(0, whole, _COMPARED):
        old_64, new_64 = before_64[start : start + _COMPARED], after_64[start : start + _COMPARED]
        hits = _where(old_64 != new_64)
        now = new_64[hits]
        deltas = (old_64[hits] ^ now).view(new.dtype)
        changed = (deltas != 0).nonzero()[0]
        places = ((hits[changed >> shift] + start) << shift) + (changed & (per_eight - 1))
        parts.append((places, deltas[changed], now.view(new.dtype)[changed]))
    rest = before[8 * whole :].view(new.dtype) ^ after[8 * whole :].view(new.dtype)
    changed = rest.nonzero()[0]
    parts.append((changed + whole * per_eight, rest[changed], after[8 * whole :].view(new.dtype)[changed]))
    indices, deltas, words = (np.concatenate(part) for part in zip(*parts, strict=True))
    return indices, deltas, words


def union(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what is in either of two strictly increasing sequences, a hundred times faster than `np.union1d`, which sorts."""
    most, fewest = (first, second) if len(first) > len(second) else (second, first)
    if not len(fewest):
        return most
    places = np.searchsorted(most, fewest)
    missing = most[np.minimum(places, len(most) - 1)] != fewest
    return np.insert(most, places[missing], fewest[missing]) if missing.any() else most


def _where(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where a mask is true. Fast when few groups of eight hold a true value."""
    if mask.size % 8:
        return mask.nonzero()[0]
    by_eight = mask.view(np.uint64)
    groups = (by_eight != 0).nonzero()[0]
    if groups.size * 16 > mask.size:
        return mask.nonzero()[0]
    changed = by_eight[groups].view(np.bool_).nonzero()[0]
    return (groups[changed >> 3] << 3) + (changed & 7)


@dataclass(frozen=True, slots=True)
class Plane:
    """One verified plane as it is sent: low and high bytes of the gaps uint8 [n_gaps], new bytes uint8 [n_values]."""

    gaps_low: Bytes
    gaps_high: Bytes
    values: Bytes
    has_fillers: bool

    def blocks(self) -> Iterator[Changes]:
        last, taken = -1, 0
        for start in range(0, self.gaps_low.size, _BLOCK):
            gaps = self.gaps_high[start : start + _BLOCK].astype(np.uint16)
            gaps <<= 8
            gaps |= self.gaps_low[start : start + _BLOCK]
            steps = gaps
            carries = steps != FILLER if self.has_fillers else None
            steps += 1 if carries is None else carries  # a filler advances 65535 words, a value one more than its gap
            indices = np.cumsum(steps, dtype=np.int64)
            indices += last
            last = int(indices[-1])
            if carries is not None:
                indices = indices[carries]
            yield Changes(indices, self.values[taken : taken + indices.size])
            taken += indices.size


@dataclass(frozen=True, slots=True)
class Parsed:
    """A verified segment: it can be applied to a bucket of exactly ``num_words`` words without further checks."""

    word_bytes: int
    num_words: int
    planes: tuple[Plane, ...]


def pack(changed: Difference, num_words: int, *, bucket: int = 0) -> bytes:
    """Write a segment from what changed in a bucket of ``num_words``, whatever code found it (on a GPU, in another bucket)."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    heads, frames = [], []
    for plane in changed.planes:
        gaps = _gaps(plane.indices)
        halves = gaps.astype(np.uint8), (gaps >> 8).astype(np.uint8)
        parts = [compressor.compress(part.data) if part.size else b"" for part in (*halves, plane.values)]
        heads.append(_PLANE.pack(plane.indices.size, gaps.size, *map(len, parts)))
        frames.extend(parts)
    header = _HEADER.pack(MAGIC, len(changed.planes), bucket, 0, num_words, changed.num_changed)
    return b"".join([header, *heads, *frames])


def parse(segment: Readable, *, num_words: int, word_bytes: int, bucket: int = 0) -> Parsed:
    """Verify a segment against the bucket it is meant for; raises only SegmentRefused.

    Memory stays below four times the bucket, for any segment: counts are compared with
    ``num_words``, and the sizes in the zstd frames with the counts, before anything is decompressed.
    """
    data = as_bytes(segment).data
    decompressor = zstandard.ZstdDecompressor()
    offset = _HEADER.size + word_bytes * _PLANE.size
    planes = []
    for number, (num_values, num_gaps, *lengths) in enumerate(_parse_header(data, num_words, word_bytes, bucket)):
        parts = []
        for length, expected in zip(lengths, (num_gaps, num_gaps, num_values), strict=True):
            parts.append(read_frame(decompressor, data[offset : offset + length], expected))
            offset += length
        planes.append(_verified(Plane(*parts, has_fillers=num_gaps != num_values), num_words, number))
    return Parsed(word_bytes, num_words, tuple(planes))


def apply(parsed: Parsed, target: Readable) -> None:
    """Write a verified segment into a bucket, in place; applying it again changes nothing.

    Raises ValueError when ``target`` is not writable or not of the segment's size; nothing is written then.
    """
    view = writable(target, parsed.num_words * parsed.word_bytes)
    for number, plane in enumerate(parsed.planes):
        bytes_of_plane = view[number :: parsed.word_bytes]
        for block in plane.blocks():
            bytes_of_plane[block.indices] = block.values


def read_frame(decompressor: zstandard.ZstdDecompressor, frame: memoryview, expected: int) -> Bytes:
    """Decompress one zstd frame of exactly ``expected`` bytes; raises SegmentRefused before it allocates more."""
    if expected == 0:
        if len(frame):
            raise SegmentRefused(f"segment: a frame of {len(frame)} bytes for no data")
        return np.empty(0, np.uint8)
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != expected:
            raise SegmentRefused(f"segment: a zstd frame declares {declared} bytes, the header says {expected}")
        data = decompressor.decompress(frame, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise SegmentRefused(f"segment: not a whole zstd frame ({err})") from None
    if len(data) != expected:
        raise SegmentRefused(f"segment: a zstd frame holds {len(data)} bytes, the header says {expected}")
    return np.frombuffer(data, dtype=np.uint8)


def _gaps(indices: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return the unchanged words before each index, as u16 with fillers for what does not fit."""
    gaps = np.empty_like(indices)
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps[1:] -= 1
    if not gaps.size or int(gaps.max()) < FILLER:
        return gaps.astype(np.uint16)
    fillers, rest = np.divmod(gaps, FILLER)
    ends = np.cumsum(fillers + 1) - 1
    filled = np.full(int(ends[-1]) + 1, FILLER, dtype=np.uint16)
    filled[ends] = rest
    return filled


def _parse_header(data: memoryview, num_words: int, word_bytes: int, bucket: int) -> list[tuple[int, ...]]:
    if len(data) < _HEADER.size:
        raise SegmentRefused(f"segment: {len(data)} bytes are too few for a header")
    magic, found_word, found_bucket, zero, found_words, num_changed = _HEADER.unpack_from(data)
    header = (magic, found_word, found_bucket, zero, found_words)
    expected = (MAGIC, word_bytes, bucket, 0, num_words)
    if header != expected:
        raise SegmentRefused(f"segment: magic, word bytes, bucket, zero, words are {header}, expected {expected}")
    if len(data) < _HEADER.size + word_bytes * _PLANE.size:
        raise SegmentRefused(f"segment: {len(data)} bytes are too few for {word_bytes} planes")
    heads = [_PLANE.unpack_from(data, _HEADER.size + plane * _PLANE.size) for plane in range(word_bytes)]
    for num_values, num_gaps, *_ in heads:
        if num_values > num_words or not num_values <= num_gaps <= num_values + num_words // FILLER:
            raise SegmentRefused(f"segment: {num_values} values and {num_gaps} gaps for {num_words} words")
    total = _HEADER.size + word_bytes * _PLANE.size + sum(sum(head[2:]) for head in heads)
    if total != len(data):
        raise SegmentRefused(f"segment: has {len(data)} bytes, its header says {total}")
    counts = [head[0] for head in heads]
    if not max(counts) <= num_changed <= min(sum(counts), num_words):
        raise SegmentRefused(f"segment: {num_changed} changed words cannot have {counts} changed bytes by plane")
    return heads


def _verified(plane: Plane, num_words: int, number: int) -> Plane:
    num_gaps, num_values = plane.gaps_low.size, plane.values.size
    if num_gaps and plane.gaps_low[-1] == 255 and plane.gaps_high[-1] == 255:
        raise SegmentRefused(f"segment: plane {number} ends with a filler")
    fillers = 0
    if num_gaps and int(plane.gaps_high.max()) == 255:
        fillers = int(np.count_nonzero((plane.gaps_high == 255) & (plane.gaps_low == 255)))
    if fillers != num_gaps - num_values:
        raise SegmentRefused(f"segment: plane {number} has {fillers} fillers, its counts say {num_gaps - num_values}")
    sum_low, sum_high = int(plane.gaps_low.sum(dtype=np.uint64)), int(plane.gaps_high.sum(dtype=np.uint64))
    last = sum_low + 256 * sum_high + num_values - 1
    if last >= num_words:
        raise SegmentRefused(f"segment: plane {number} reaches word {last}, the bucket has {num_words}")
    return plane
