"""Hostile packs are refused with a reason, in little memory and time, whatever is wrong with them."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest
from tests.protocol.hostile_packs import HOSTILE, TRAINER_ONLY, honest

from penstock.protocol.errors import PackError
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import pack_bounds

_MEMORY_BYTES = 64 * 1024**2


def test_an_honest_pack_is_read():
    assert honest().read().group_id == honest().read_texts().group_id


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pack_is_refused(name: str):
    """The trainer refuses it as a PackError; the reward service too, where it can see it. Neither decodes much."""
    hostile = HOSTILE[name]()
    allocated, started = pa.total_allocated_bytes(), time.process_time()
    with pytest.raises(PackError):
        hostile.read()
    if name in TRAINER_ONLY:
        hostile.read_texts()
    else:
        with pytest.raises(PackError):
            hostile.read_texts()
    assert pa.total_allocated_bytes() - allocated < _MEMORY_BYTES
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("half a file", "magic bytes"),
        ("a hundred columns more", "more than 80 elements"),
        ("fewer rows than described", "has 2 rows, expected 3"),
        ("described as row group 10^15", "of a pack that has 1"),
        ("an Arrow schema with dictionaries", "the columns are not those of a pack"),
        ("zeros of 90 MB in 2 kB", "would decode to more than"),
        ("a page of a list claims more values", "its pages hold 60 values"),
        ("page checksums", "of a form that packs do not use"),
        ("pages of version 2", "of a form that packs do not use"),
        ("delta encodings", "has encoding 5"),
        ("a negative version", "do not cover exactly"),
        ("version runs that name tokens twice", r"\(2, 4, 7\), \(2, 4, 7\)"),
        ("version runs that name half of the tokens twice", r"do not cover exactly the 10 sampled"),
        ("no prompt", "0 prompt tokens in a trajectory"),
        ("a prompt longer than the trajectory", "500 prompt tokens in a trajectory"),
        ("a prompt that was sampled", "tokens of the prompt were sampled"),
        ("a mask of another token than the sampled one", "do not cover exactly"),
        ("arrays of different lengths", "lists of different lengths"),
    ],
)
def test_the_reason_says_what_is_wrong(name: str, reason: str):
    """It is the check for that kind of pack which refuses it, before Parquet or a later check does."""
    with pytest.raises(PackError, match=reason):
        HOSTILE[name]().read()


@pytest.mark.parametrize(
    ("size_bytes", "changes", "complaint"),
    [
        (2**40, {}, "bytes, at most"),
        (100, {"group_id": "e0.p1.a0"}, "the same row group"),
        (100, {"row_group": 1}, "the same id"),
        (100, {"group_id": "e0.p1.a0", "row_group": 1, "completion_tokens": (1,) * 5000}, "at most 4097"),
    ],
)
def test_a_message_that_contradicts_itself_is_refused_before_its_pack_is_fetched(
    size_bytes: int, changes: dict, complaint: str
):
    """A pack larger than its tokens can be, a group named twice, and a group larger than any task are refused."""
    one = honest().described
    ref = BlobRef(key="runs/r/groups/x.parquet", size_bytes=size_bytes, sha256="0" * 64)
    groups = [one, one.model_copy(update=changes)] if changes else [one]
    with pytest.raises(PackError, match=complaint):
        pack_bounds.check_message(ref, groups)
