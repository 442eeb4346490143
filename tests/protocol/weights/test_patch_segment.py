"""Patch segments restore changes bit for bit, however often and to any bytes they are applied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.protocol.weights.published_weights import packed

from penstock.protocol.errors import SegmentRefused
from penstock.protocol.weights import bucket_codec, patch_segment
from penstock.protocol.weights.patch_segment import FILLER, Changes, Difference

WORD_BYTES = st.sampled_from(patch_segment.WORD_BYTES)
DENSITIES = st.sampled_from([0.0, 1e-4, 0.009, 0.1, 0.4, 0.6, 1.0])


def draw_pair(seed: int, num_words: int, word_bytes: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw a bucket and a successor; half of the changed words change by one unit in the last place only."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, num_words * word_bytes, dtype=np.uint8)
    new = old.copy()
    words = new.reshape(num_words, word_bytes)
    hit = rng.random(num_words) < density
    words[hit] = rng.integers(0, 256, (int(hit.sum()), word_bytes), dtype=np.uint8)
    nudge = rng.random(num_words) < density
    words[nudge, 0] ^= 1
    return old, new


def applied(segment: bytes, target: np.ndarray, word_bytes: int, bucket: int = 0) -> np.ndarray:
    parsed = patch_segment.parse(segment, num_words=target.size // word_bytes, word_bytes=word_bytes, bucket=bucket)
    result = target.copy()
    patch_segment.apply(parsed, result)
    return result


@given(st.integers(0, 2**32), st.integers(0, 5000), WORD_BYTES, DENSITIES, st.floats(0, 1))
@examples(120)
def test_a_segment_turns_the_old_bucket_into_the_new_one(
    seed: int, num_words: int, word_bytes: int, density: float, torn: float
):
    """Every byte, for every word size and density, of no and single words; also if a part or all was written before."""
    old, new = draw_pair(seed, num_words, word_bytes, density)
    written = np.random.default_rng(seed + 1).random(old.size) < torn
    segment = packed(old, new, word_bytes, bucket=7)
    for target in (old, np.where(written, new, old), new):
        assert np.array_equal(applied(segment, target, word_bytes, bucket=7), new)


@given(st.sets(st.integers(0, 300), max_size=80), st.sets(st.integers(0, 300), max_size=80))
@examples(100)
def test_words_of_either_of_two_changes(first: set[int], second: set[int]):
    both = patch_segment.union(*(np.array(sorted(words), np.int64) for words in (first, second)))
    assert both.dtype == np.int64
    assert both.tolist() == sorted(first | second)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_special_values_are_only_bits(dtype: type):
    """Zeros change their sign, NaNs their payload, and equal NaNs count as unchanged."""
    old = np.array([0.0, -0.0, np.nan, np.nan, np.inf, 1.0], dtype)
    new = np.array([-0.0, 0.0, np.nan, np.nan, -np.inf, 1.0], dtype)
    new.view(np.uint8)[2 * old.itemsize] ^= 1  # another payload
    segment = packed(old, new, old.itemsize)
    parsed = patch_segment.parse(segment, num_words=old.size, word_bytes=old.itemsize)
    assert bucket_codec.encode(old, new, old.itemsize).num_changed == 4
    target = old.copy()
    patch_segment.apply(parsed, target)
    assert target.tobytes() == new.tobytes()


@pytest.mark.parametrize("word_bytes", patch_segment.WORD_BYTES)
@pytest.mark.parametrize("gap", [FILLER - 1, FILLER, FILLER + 1, 2 * FILLER, 3 * FILLER + 17])
def test_gaps_beyond_sixteen_bits_are_bridged(word_bytes: int, gap: int):
    """A gap of any length is restored, at the start and between two changes."""
    old = np.zeros((2 * gap + 5) * word_bytes, np.uint8)
    new = old.copy()
    new[[gap * word_bytes, (2 * gap + 1) * word_bytes]] = (1, 2)
    assert np.array_equal(applied(packed(old, new, word_bytes), old, word_bytes), new)


def test_fillers_may_be_at_the_border_of_a_block():
    """Thousands of long gaps, more than are decoded in one block, are restored."""
    rng = np.random.default_rng(5)
    indices = np.cumsum(rng.integers(1, 3 * FILLER, 40_000))
    changes = Changes(indices, rng.integers(0, 256, indices.size, dtype=np.uint8))
    num_words = int(indices[-1]) + 1
    segment = patch_segment.pack(Difference((changes,), indices.size), num_words)
    (plane,) = patch_segment.parse(segment, num_words=num_words, word_bytes=1).planes
    blocks = list(plane.blocks())
    assert len(blocks) > 1
    assert np.array_equal(np.concatenate([block.indices for block in blocks]), indices)
    assert np.array_equal(np.concatenate([block.values for block in blocks]), changes.values)


@given(st.integers(0, 2**32), st.integers(1, 2000), WORD_BYTES, st.lists(DENSITIES, min_size=1, max_size=5))
@examples(60)
def test_changes_in_their_order_lead_to_the_last_state(
    seed: int, num_words: int, word_bytes: int, densities: list[float]
):
    """Sparse and whole ones mixed."""
    state, start, changes = np.empty(0), np.empty(0), []
    for step, density in enumerate(densities):
        old, new = draw_pair(seed + step, num_words, word_bytes, density)
        start = old if step == 0 else start
        new = np.where(old != new, new, state) if step else new
        encoded = bucket_codec.encode(old if step == 0 else state, new, word_bytes)
        state = new
        if encoded.codec != "none":
            changes.append(bucket_codec.parse(encoded.codec, encoded.data, num_words=num_words, word_bytes=word_bytes))
    target = start.copy()
    for change in changes:
        bucket_codec.apply(change, target)
    assert np.array_equal(target, state)


def test_the_codec_follows_the_density():
    """An equal bucket is not stored, a sparse change as gaps, a dense one whole; every one leads to the new bucket."""
    for density, codec in ((0.0, "none"), (0.01, "gapabs1"), (0.95, "raw_zstd")):
        old, new = draw_pair(3, 20_000, 2, density)
        encoded = bucket_codec.encode(old, new, 2)
        assert encoded.codec == codec
        assert encoded.num_changed == np.count_nonzero(old.view(np.uint16) != new.view(np.uint16))


def test_a_one_percent_change_is_stored_in_about_one_percent():
    """16.2 bits for each changed word of bf16: gaps of 8.2 bits and 8 of value."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 2**20, dtype=np.uint16)
    new = old + (rng.random(old.size) < 0.009).astype(np.uint16)
    assert len(packed(old, new, 2)) < 0.0102 * old.nbytes


@pytest.mark.parametrize("codec", ["gapabs1", "raw_zstd"])
def test_a_segment_of_another_bucket_is_refused(codec: str):
    """Number, size and word of the bucket must be those of the segment; every prefix is refused as well."""
    old, new = draw_pair(1, 500, 2, 0.2)
    data = packed(old, new, 2, bucket=4)
    if codec == "raw_zstd":
        data = bucket_codec.encode_whole(new, 2, bucket=4, num_changed=100)
    bucket_codec.parse(codec, data, num_words=500, word_bytes=2, bucket=4)
    wrong: list[dict[str, int]] = [{"num_words": 501}, {"num_words": 499}, {"word_bytes": 4}, {"bucket": 5}]
    for change in wrong:
        with pytest.raises(SegmentRefused, match="expected"):
            bucket_codec.parse(codec, data, **({"num_words": 500, "word_bytes": 2, "bucket": 4} | change))
    for cut in range(len(data)):
        with pytest.raises(SegmentRefused):
            bucket_codec.parse(codec, data[:cut], num_words=500, word_bytes=2, bucket=4)
    with pytest.raises(SegmentRefused):
        bucket_codec.parse("none", data, num_words=500, word_bytes=2, bucket=4)


def test_a_target_that_does_not_fit_is_not_written():
    """A buffer of another size or a read-only one is an error before the first byte."""
    old, new = draw_pair(1, 500, 2, 0.2)
    for data, codec in (
        (packed(old, new, 2), "gapabs1"),
        (bucket_codec.encode_whole(new, 2, num_changed=100), "raw_zstd"),
    ):
        change = bucket_codec.parse(codec, data, num_words=500, word_bytes=2)
        for target in (old[:-2].copy(), bytes(1000)):
            with pytest.raises(ValueError, match="writable buffer of 1000 bytes"):
                bucket_codec.apply(change, target)


def test_an_array_with_holes_is_not_written_to_a_copy():
    """A strided target is an error: writing to a copy of it would be silently lost."""
    with pytest.raises(ValueError, match="not contiguous"):
        patch_segment.as_bytes(np.zeros((4, 4), np.uint16)[:, ::2])


@pytest.mark.parametrize("offset", [1, 3])
def test_buffers_may_begin_at_any_address(offset: int):
    """A bucket in the middle of a file is diffed and patched in place, and adjacent bytes are unchanged."""
    old, new = draw_pair(2, 5001, 2, 0.01)
    one, two = np.full(old.size + 8, 7, np.uint8), np.full(old.size + 8, 7, np.uint8)
    place = slice(offset, offset + old.size)
    one[place], two[place] = old, new
    segment = packed(memoryview(one)[place], memoryview(two)[place], 2)
    patch_segment.apply(patch_segment.parse(segment, num_words=5001, word_bytes=2), memoryview(one)[place])
    assert np.array_equal(one, two)


def test_buffers_of_different_sizes_are_no_patch():
    with pytest.raises(ValueError, match="same layout"):
        packed(b"1234", b"123456", 2)
    with pytest.raises(ValueError, match="not a multiple of 2"):
        bucket_codec.encode(b"123", b"123", 2)
    with pytest.raises(ValueError, match="not a multiple of 2"):
        bucket_codec.encode_whole(b"123", 2, num_changed=0)
