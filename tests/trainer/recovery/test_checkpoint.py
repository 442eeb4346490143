"""A checkpoint is complete or not there."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import power

from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState
from penstock.protocol.record.lineage import AccountState, SplitTotals
from penstock.trainer.errors import CheckpointError, LeaseLost
from penstock.trainer.recovery import checkpoint

RECORD = BlobRef(key="runs/r/lineage/x", size_bytes=1, sha256="0" * 64)


def state(step: int, run_id: str = "r", *, epoch: int = 1, chapter: int = 1, weights: str = "a") -> CheckpointState:
    return CheckpointState(
        run_id=run_id, epoch=epoch, step=step, version=step + 1, weights_digest=weights * 64, weights_dtype="bfloat16",
        ledger=((step, ("e0.p1.a0", "e0.p2.a0")),), dispatch={"position": 7}, totals={"groups_trained": 3},
        account=AccountState(in_flight={"train": ("e0.p9.a0",)}), metrics_bytes=11, record=RECORD, chapter=chapter,
    )  # fmt: skip


def write(folder: Path) -> None:
    (folder / "engine").mkdir()
    (folder / "engine" / "weights.bin").write_bytes(b"weights")


def newest(folder: Path) -> tuple[Path, CheckpointState]:
    found = checkpoint.newest(folder, "r")
    assert found is not None
    return found


def stored(committed: CheckpointState) -> CheckpointState:
    return committed.model_copy(update={"files": {"engine/weights.bin": hashlib.sha256(b"weights").hexdigest()}})


def test_the_newest_checkpoint_is_read_back(tmp_path: Path) -> None:
    for step in (2, 4, 12):
        checkpoint.commit(tmp_path, state(step), write, keep=2)
    found = newest(tmp_path)
    assert found[1] == stored(state(12))
    assert (found[0] / "engine" / "weights.bin").read_bytes() == b"weights"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step00000004", "step00000012"]


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    """A total beyond the range of a count is named, for a new step and for the same; the previous checkpoint stays."""
    checkpoint.commit(tmp_path, state(2), write, keep=2)
    too_many = AccountState().model_copy(
        update={"totals": {"train": SplitTotals().model_copy(update={"issued": 2**60})}}
    )
    for attempt in (state(2, chapter=2), state(4)):
        with pytest.raises(
            CheckpointError, match=rf"after step {attempt.step} is not valid .* account\.totals\.train\.issued"
        ):
            checkpoint.commit(tmp_path, attempt.model_copy(update={"account": too_many}), write, keep=2)
    assert newest(tmp_path)[1] == stored(state(2))


def test_a_crash_while_writing_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, state(2), write, keep=2)

    def crash(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.commit(tmp_path, state(4), crash, keep=2)
    assert checkpoint.partial_of(tmp_path, state(4)).exists()
    assert newest(tmp_path)[1].step == 2
    assert not checkpoint.partial_of(tmp_path, state(4)).exists()


def test_a_crash_while_an_old_checkpoint_is_removed_leaves_the_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        checkpoint.commit(tmp_path, state(step), write, keep=2)

    def crash(folder: Path, **_: object) -> None:
        if (folder / STATE_FILE).exists():
            (folder / STATE_FILE).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as half_way:
        half_way.setattr(checkpoint.shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.commit(tmp_path, state(6), write, keep=2)
    assert newest(tmp_path)[1].step == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step00000004", "step00000006"]


def test_a_chapter_without_a_step_replaces_the_state(tmp_path: Path) -> None:
    """The next chapter on the same weights leaves the policy's files unchanged, and counts at once."""
    checkpoint.commit(tmp_path, state(2), write, keep=2)
    later = state(2, epoch=2, chapter=2)
    checkpoint.commit(tmp_path, later, lambda _: pytest.fail("written again"), keep=2)
    found = newest(tmp_path)
    assert found[1] == stored(later)
    assert (found[0] / "engine" / "weights.bin").read_bytes() == b"weights"


def test_a_lost_lease_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """`confirm`, called immediately before the rename, can prevent it, for a new step and for the same one."""
    checkpoint.commit(tmp_path, state(2), write, keep=2)

    def refuse() -> None:
        raise LeaseLost("another trainer holds the run")

    for attempt in (state(2, chapter=2), state(4)):
        with pytest.raises(LeaseLost):
            checkpoint.commit(tmp_path, attempt, write, keep=2, confirm=refuse)
        assert newest(tmp_path)[1] == stored(state(2))


def test_a_folder_of_an_older_epoch_is_replaced(tmp_path: Path) -> None:
    """What a suspended trainer committed after it lost its lease is replaced; that trainer cannot replace it again."""
    checkpoint.commit(tmp_path, state(10, epoch=1), write, keep=3)
    checkpoint.commit(tmp_path, state(12, epoch=1, weights="b"), write, keep=3)  # resumed in the middle of a commit
    newer = state(12, epoch=2)
    checkpoint.commit(tmp_path, newer, write, keep=3)
    assert newest(tmp_path)[1] == stored(newer)
    with pytest.raises(LeaseLost, match=r"epoch 2, this is 1"):
        checkpoint.commit(tmp_path, state(12, epoch=1, chapter=2), write, keep=3)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent", "r") is None


def test_a_foreign_or_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    """Another run's checkpoint, or one whose state is not readable, is an error that names the folder."""
    checkpoint.commit(tmp_path, state(2), write, keep=2)
    folder = tmp_path / "step00000002"
    with pytest.raises(CheckpointError, match="belongs to run r, this is run other"):
        checkpoint.newest(tmp_path, "other")
    (folder / "state.json").write_text('{"run_id": "r"}')
    with pytest.raises(CheckpointError, match=r"not readable .*step00000002.*epoch: Field required.*remove its folder"):
        checkpoint.newest(tmp_path, "r")


@pytest.fixture(params=["a limit on files", "a full disk"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for one megabyte: by the process's limit, and by a file system of that size."""
    if request.param == "a limit on files":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        yield tmp_path
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    with power.small_disk(tmp_path / "disk", 1024 * 1024) as folder:
        yield folder


@pytest.mark.parametrize("writer", ["plain", "torch"])
def test_a_full_disk_leaves_the_older_checkpoint_and_names_the_fix(small_disk: Path, writer: str) -> None:
    """The error names folder and free space; the partial checkpoint is removed, so that its space is free again."""

    def write_too_much(folder: Path) -> None:
        if writer == "plain":
            (folder / "weights.bin").write_bytes(bytes(3_000_000))
        else:
            torch.save({"weights": torch.zeros(1_000_000)}, folder / "weights.pt")

    checkpoint.commit(small_disk, state(2), write, keep=2)
    with pytest.raises(
        CheckpointError, match=r"step00000004 could not be written below .*\(.*MB are free.*start the trainer again"
    ):
        checkpoint.commit(small_disk, state(4), write_too_much, keep=2)
    assert [path.name for path in small_disk.iterdir()] == ["step00000002"]
    assert newest(small_disk)[1] == stored(state(2))
    checkpoint.commit(small_disk, state(4), write, keep=2)
