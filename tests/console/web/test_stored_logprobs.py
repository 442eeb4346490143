"""The trainer's log-probabilities are shown where a step stored them, and where not the reason is."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.console.web.shown_run import made_logprobs, store_logprobs
from tests.groups import make_groups

from penstock.console.web.reading.recorded_groups import Entry, Storing, why_absent, why_not_this_group
from penstock.console.web.reading.stored_logprobs import Current, StoredLogprobs
from penstock.protocol import blob_keys
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import step_logprobs
from penstock.protocol.transport.blobs import Blobs

PACK = BlobRef(key="pack", size_bytes=1, sha256="a" * 64)
GROUPS = make_groups(2, size=3)
STORING = Storing("all")


def entry(**changes: Any) -> Entry:
    """The second group of step 7, made in epoch 2."""
    found = Entry(
        GROUPS[1].group_id, "trained", 1, "train", 9, PACK, step=7, epoch=2, trained_version=6, made_version=7
    )
    return replace(found, **changes)


def read(blobs: Blobs, run_id: str, **changes: Any) -> Current:
    return StoredLogprobs(run_id, blobs).of_group(entry(**changes), GROUPS[1], STORING)


def test_the_object_of_the_session_that_made_the_step_is_read(blobs: Blobs, run_id: str) -> None:
    """A step that a crash rolled back left one under an older epoch; a second request reads nothing again."""
    store_logprobs(blobs, run_id, 7, [replace(GROUPS[1], group_id="other")], PACK, epoch=1)
    key = store_logprobs(blobs, run_id, 7, GROUPS, PACK, epoch=2)
    reader = StoredLogprobs(run_id, blobs)
    found = reader.of_group(entry(), GROUPS[1], STORING)
    assert (sorted(found.rows), found.problem) == ([0, 1, 2], "")
    expected = made_logprobs(run_id, 7, GROUPS, PACK).group(GROUPS[1].group_id, PACK.sha256)
    assert expected is not None
    for number, row in found.rows.items():
        assert row.logprobs.tolist() == expected[number].logprobs.tolist()
    blobs.delete([key])
    assert reader.of_group(entry(), GROUPS[1], STORING).rows.keys() == found.rows.keys()


def test_what_is_not_that_of_the_group_is_refused_with_the_reason(blobs: Blobs, run_id: str) -> None:
    """Another step's, another pack's, damaged, or one of several: the page shows the rest of the group."""
    store_logprobs(blobs, run_id, 7, GROUPS, PACK, epoch=2)
    made = made_logprobs(run_id, 8, GROUPS, PACK)
    shorter = step_logprobs.encode(replace(made, rows=made.rows - [0, 0, 1], logprobs=made.logprobs[6:], outcomes=made.outcomes[6:]))  # fmt: skip
    for step, data, name in (
        (3, b"nothing of ours", None), (4, step_logprobs.encode(made), None), (8, shorter, None), (5, b"altered", "c" * 64),
        (6, b"", "no digest"), (9, b"one", "c" * 64), (9, b"another", "d" * 64),
    ):  # fmt: skip
        blobs.put(blob_keys.step_logprobs(run_id, step, 2, name or hashlib.sha256(data).hexdigest()), data)
    next_step = {"trained_version": 7, "made_version": 8}
    for changes, reason in (
        ({"group_id": "e0.p9.a0"}, "2 groups, and this one is not among them"),
        ({"pack": BlobRef(key="pack", size_bytes=1, sha256="b" * 64)}, "this one is not among them"),
        ({"made_version": 8}, "of other versions than the record's"),
        ({"step": 10}, "no log-probabilities of step 10"),
        ({"step": 3}, "not what a trainer writes"),
        ({"step": 4}, "they are of step 8"),
        ({"step": 8, **next_step}, "they are of another pack"),
        ({"step": 5}, "the object does not match"),
        ({"step": 6}, "its name is no sha256"),
        ({"step": 9}, "2 objects below"),
    ):
        found = read(blobs, run_id, **changes)
        assert (dict(found.rows), reason in found.problem) == ({}, True), found.problem


def test_an_object_that_is_too_large_is_not_fetched(blobs: Blobs, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store_logprobs(blobs, run_id, 7, GROUPS, PACK, epoch=2)
    monkeypatch.setattr(step_logprobs, "MAX_BYTES", 100)
    monkeypatch.setattr(blobs, "get", None)
    assert f"{key} has " in read(blobs, run_id).problem


@pytest.mark.parametrize(
    ("storing", "why"),
    [
        (Storing.of({"settings": {"trainer": {"store_logprobs": 0}}}, None), "trainer.store_logprobs is 0"),
        (Storing.of({"settings": {"trainer": {}}}, None), "settings have no trainer.store_logprobs"),
        (Storing.of({}, 3.0), "settings have no trainer.store_logprobs"),
        (Storing("all", 3), "could not store 3 steps of its newest session"),
        (Storing(4), "deleted with their packs, or the trainer was killed"),
    ],
)
def test_one_sentence_says_why_a_step_has_none(storing: Storing, why: str) -> None:
    """From the run's settings and the trainer's count."""
    found = why_absent(7, storing)
    assert why in found
    assert found.count(". ") == 0


def test_one_sentence_says_why_a_group_of_a_step_has_none() -> None:
    assert "trainer.store_logprobs is 4" in why_not_this_group(7, 4, Storing(4))
    assert "filters left out" in why_not_this_group(7, 4, STORING)
    assert np.all([text.endswith(".") for text in (why_not_this_group(7, 4, STORING), why_absent(1, STORING))])
