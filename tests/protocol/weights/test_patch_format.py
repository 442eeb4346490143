"""The byte tables of `protocol/README.md`, read by a decoder that was written from them and shares no code with Penstock."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from tests.protocol.weights.published_weights import packed

from penstock.protocol.weights import bucket_codec


def decode_by_the_book(segment: bytes, bucket: bytearray, word_bytes: int) -> None:
    assert segment[4] == word_bytes
    assert segment[5:8] == bytes(3)
    assert segment[12:16] == bytes(4)
    (num_words,) = struct.unpack_from("<Q", segment, 16)
    assert num_words * word_bytes == len(bucket)
    if segment[:4] == b"RAW1":
        at = 32 + 8 * word_bytes
        for plane in range(word_bytes):
            (length,) = struct.unpack_from("<Q", segment, 32 + 8 * plane)
            bucket[plane::word_bytes] = zstandard.decompress(segment[at : at + length])
            at += length
        assert at == len(segment)
        return
    assert segment[:4] == b"GAB1"
    at = 32 + 40 * word_bytes
    for plane in range(word_bytes):
        num_values, num_gaps, *lengths = struct.unpack_from("<QQQQQ", segment, 32 + 40 * plane)
        parts = []
        for length in lengths:
            parts.append(zstandard.decompress(segment[at : at + length]) if length else b"")
            at += length
        low, high, values = parts
        assert (len(low), len(high), len(values)) == (num_gaps, num_gaps, num_values)
        index, rest = -1, iter(values)
        for gap in (a + 256 * b for a, b in zip(low, high, strict=True)):
            if gap == 65535:
                index += 65535
            else:
                index += gap + 1
                bucket[index * word_bytes + plane] = next(rest)
        assert next(rest, None) is None
    assert at == len(segment)


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.00003, 0.01, 0.5])
def test_a_decoder_written_from_the_tables_reads_our_segments(word_bytes: int, density: float):
    rng = np.random.default_rng(word_bytes)
    num_words = 200_000
    old = rng.integers(0, 256, num_words * word_bytes, dtype=np.uint8)
    new = old.copy()
    new.reshape(num_words, word_bytes)[rng.random(num_words) < density] += 1
    for segment in (
        packed(old, new, word_bytes, bucket=9),
        bucket_codec.encode_whole(new, word_bytes, bucket=9, num_changed=0),
    ):
        bucket = bytearray(old.tobytes())
        decode_by_the_book(segment, bucket, word_bytes)
        assert bucket == new.tobytes()
        assert struct.unpack_from("<I", segment, 8) == (9,)


def test_the_smallest_segment_by_hand():
    """Word 3 of five bf16 words: its low byte becomes 0x7F, its high byte is unchanged; every byte of the header as documented."""
    old = bytes.fromhex("0000 0000 0000 00c0 0000")
    new = bytes.fromhex("0000 0000 0000 7fc0 0000")
    segment = packed(old, new, 2, bucket=1)
    assert segment[:48].hex(" ", 8) == (
        "4741423102000000 0100000000000000 0500000000000000 0100000000000000 0100000000000000 0100000000000000"
    )
    assert segment[72:112] == bytes(40)  # the high plane has no change
    frames = [zstandard.decompress(segment[start : start + 10]) for start in (112, 122, 132)]
    assert frames == [b"\x03", b"\x00", b"\x7f"]
    assert len(segment) == 142
