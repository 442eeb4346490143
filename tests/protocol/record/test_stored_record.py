"""A run record is consistent: a chapter that does not continue the one before is an error with its position."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.protocol.record.test_lineage import BLOB, chapter

from penstock.protocol.errors import RecordBroken
from penstock.protocol.facts import encode, encode_unbounded
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.lineage import CheckpointCommitted, LineageChapter
from penstock.protocol.record.stored_record import StoredRecord, end_of_record


@dataclass
class Shelf:
    """Chapters by key, as an object store holds them."""

    held: dict[str, bytes] = field(default_factory=dict)

    def put(self, one: LineageChapter) -> BlobRef:
        reference = BlobRef(key=f"chapter{len(self.held)}", size_bytes=1, sha256="0" * 64)
        self.held[reference.key] = encode_unbounded(one)
        return reference

    def get(self, reference: BlobRef) -> bytes:
        return self.held[reference.key]

    def read(self, *changes: Callable[[LineageChapter], LineageChapter]) -> StoredRecord:
        last = None
        for number in (1, 2, 3):
            one = chapter(number, last)
            for change in changes:
                one = change(one)
            last = self.put(one)
        assert last is not None
        return StoredRecord.read("r", last, self.get)


def test_a_record_is_consistent() -> None:
    """Trainer processes and steps are in order; versions are found by step, groups by the steps that used them."""
    record = Shelf().read()
    assert [step.step for step in record.steps] == [1, 2, 3]
    assert record.maker_of(0) == record.sessions[0]
    assert record.maker_of(2) == record.steps[1]
    assert [use.step.step for use in record.uses_of("e0.p2.a0")] == [2]
    assert record.session_of(record.steps[2]) == record.sessions[0]
    with pytest.raises(RecordBroken, match=r"no version 9 .* ends with version 3"):
        record.maker_of(9)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.model_copy(update={"number": 7}) if c.number == 2 else c, "in place of chapter 2, chapter 7"),
        (lambda c: c.model_copy(update={"run_id": "other"}), "of run other"),
        (lambda c: c.model_copy(update={"version": 9}), "is of version 9, its steps end with 1"),
        (lambda c: c.model_copy(update={"steps": ()}) if c.number == 2 else c, "is of version 2, its steps end with 1"),
        (lambda c: c.model_copy(update={"lives": ()}), "expected step 1 on version None"),
    ],
    ids=["number", "run", "version", "step", "life"],
)  # fmt: skip
def test_what_does_not_follow_is_refused(change: Callable[[LineageChapter], LineageChapter], says: str) -> None:
    """Chapters, steps and versions are compared with one another, even if their hashes are right."""
    with pytest.raises(RecordBroken, match=says):
        Shelf().read(change)


def test_without_a_checkpoint_the_end_is_taken_from_nats(tmp_path: Path) -> None:
    """Without the run's folder the key in NATS names the last chapter; a run that committed nothing has none."""
    known = CheckpointCommitted(epoch=1, step=3, version=3, chapter=3, record=BLOB, state_sha256="0" * 64)
    assert end_of_record("r", tmp_path, lambda: encode(known)) == BLOB
    for nothing in (None, encode(CheckpointCommitted(epoch=1))):
        with pytest.raises(RecordBroken, match="committed no checkpoint"):
            end_of_record("r", tmp_path, lambda nothing=nothing: nothing)
