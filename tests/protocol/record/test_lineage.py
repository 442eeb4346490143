"""The record of a run: chapters that name their parents, and the checkpoint that names the last one."""

from pathlib import Path

import pytest
from tests.groups import make_generated, make_group, make_scored

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, MalformedFact
from penstock.protocol.facts import encode_unbounded
from penstock.protocol.groups import BlobRef
from penstock.protocol.record import checkpoint_state
from penstock.protocol.record.checkpoint_state import (
    PARTIAL,
    STATE_FILE,
    CheckpointState,
    committed,
    folder_name,
    read_state,
)
from penstock.protocol.record.lineage import (
    AccountState,
    LineageChapter,
    RecordedGroup,
    RecordedSession,
    RecordedStep,
    SplitTotals,
    chapters,
)
from penstock.protocol.transport.blobs import Blobs

BLOB = BlobRef(key="runs/r/x", size_bytes=1, sha256="0" * 64)


def chapter(number: int, parent: BlobRef | None) -> LineageChapter:
    group = make_group(f"e0.p{number}.a0", size=2)
    scored = make_scored(make_generated("r", [group])).groups[0]
    step = RecordedStep(
        epoch=1,
        step=number,
        trained_version=number - 1,
        made_version=number,
        weights_digest="a" * 64,
        packs=(BLOB,),
        groups=(RecordedGroup(prompt=number, pack=0, scored=scored),),
        skipped={"too_long": 1},
    )
    life = RecordedSession(
        epoch=1, holder="t", at=1.0, step=0, version=0, parent_version=None, weights_digest="b" * 64, config=BLOB
    )
    totals = SplitTotals(issued=number, used=number, used_tokens=number * step.groups[0].num_tokens)
    return LineageChapter(
        run_id="r",
        number=number,
        parent=parent,
        epoch=1,
        step=number,
        version=number,
        weights_digest="a" * 64,
        lives=(life,) if number == 1 else (),
        steps=(step,),
        issued={"train": (group.group_id,)},
        account=AccountState(totals={"train": totals}, in_flight={"train": ()}),
    )


def test_a_record_reads_back_from_its_end(blobs: Blobs, run_id: str):
    """From the last chapter every earlier one is found, verified and equal to what was written."""
    written, last = [], None
    for number in (1, 2, 3):
        written.append(chapter(number, last))
        last = blobs.put(blob_keys.lineage_chapter(run_id, number, 1, "x"), encode_unbounded(written[-1]))
    assert list(chapters(last, blobs.get)) == written[::-1]
    assert written[0].steps[0].groups[0].group_id == "e0.p1.a0"


def test_an_altered_chapter_is_an_error(blobs: Blobs, run_id: str):
    first = blobs.put(blob_keys.lineage_chapter(run_id, 1, 1, "x"), encode_unbounded(chapter(1, None)))
    last = blobs.put(blob_keys.lineage_chapter(run_id, 2, 1, "x"), encode_unbounded(chapter(2, first)))
    blobs.put(first.key, encode_unbounded(chapter(4, None)))
    with pytest.raises(BlobCorrupt, match="chapter00000001"):
        list(chapters(last, blobs.get))


def state(step: int, epoch: int) -> CheckpointState:
    return CheckpointState(
        run_id="r",
        epoch=epoch,
        step=step,
        version=step,
        weights_digest="a" * 64,
        weights_dtype="bfloat16",
        ledger=((step, ("e0.p1.a0",)),),
        dispatch={},
        totals={},
        account=AccountState(),
        metrics_bytes=0,
        record=BLOB,
        chapter=1,
    )


def test_the_newest_checkpoint_is_of_the_highest_epoch(tmp_path: Path):
    """A folder that a trainer left after it had lost its lease never counts, however far it was."""
    for step, epoch in ((12, 1), (11, 2), (9, 1)):
        folder = tmp_path / folder_name(step)
        folder.mkdir()
        (folder / STATE_FILE).write_text(state(step, epoch).model_dump_json())
    (tmp_path / f"{folder_name(13)}.e2.partial").mkdir()
    assert [found.step for _, found in committed(tmp_path)] == [9, 12, 11]
    assert committed(tmp_path)[-1] == (tmp_path / folder_name(11), state(11, 2))


def test_a_checkpoint_that_is_removed_while_it_is_read_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a running trainer removes the oldest; a folder that stays without its state is an error."""
    for step in (1, 2):
        folder = tmp_path / folder_name(step)
        folder.mkdir()
        (folder / STATE_FILE).write_text(state(step, 1).model_dump_json())

    def read(folder: Path) -> CheckpointState:
        if folder.name == folder_name(1):
            folder.rename(folder.with_name(f"{folder.name}.removed{PARTIAL}"))
        return read_state(folder)

    monkeypatch.setattr(checkpoint_state, "read_state", read)
    assert [found.step for _, found in committed(tmp_path)] == [2]
    (tmp_path / folder_name(2) / STATE_FILE).unlink()
    with pytest.raises(FileNotFoundError):
        committed(tmp_path)


def test_a_checkpoint_that_does_not_read_is_named(tmp_path: Path):
    folder = tmp_path / folder_name(2)
    folder.mkdir()
    (folder / STATE_FILE).write_text('{"run_id": "r"}')
    with pytest.raises(MalformedFact, match=r"step00000002/state.json: epoch"):
        committed(tmp_path)
