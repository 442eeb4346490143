"""A checkpoint is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import checkpoint
from trainer.checkpoint import TrainerState
from trainer.errors import CheckpointError


def state(step: int, run_id: str = "r") -> TrainerState:
    return TrainerState(
        run_id=run_id, step=step, version=step + 1, ledger=((step, ("e0.p1.a0", "e0.p2.a0")),),
        dispatch={"position": 7}, totals={"groups_trained": 3}, metrics_bytes=11,
    )  # fmt: skip


def write(folder: Path) -> None:
    (folder / "engine").mkdir()
    (folder / "engine" / "weights.bin").write_bytes(b"weights")


def test_the_newest_checkpoint_comes_back(tmp_path: Path) -> None:
    """State and files of the newest checkpoint are read back; only the newest few stay."""
    for step in (2, 4, 12):
        checkpoint.commit(tmp_path, state(step), write, keep=2)
    found = checkpoint.newest(tmp_path, "r")
    assert found is not None
    assert found[1] == state(12)
    assert (found[0] / "engine" / "weights.bin").read_bytes() == b"weights"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step00000004", "step00000012"]


def test_a_crash_while_writing_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that was not committed is not seen, and is cleared away."""
    checkpoint.commit(tmp_path, state(2), write, keep=2)

    def crash(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.commit(tmp_path, state(4), crash, keep=2)
    assert checkpoint.partial_of(tmp_path, 4).exists()
    found = checkpoint.newest(tmp_path, "r")
    assert found is not None
    assert found[1].step == 2
    assert not checkpoint.partial_of(tmp_path, 4).exists()


def test_committing_a_step_again_changes_nothing(tmp_path: Path) -> None:
    """A life that made no step leaves the checkpoint it came from."""
    first = checkpoint.commit(tmp_path, state(2), write, keep=2)
    assert checkpoint.commit(tmp_path, state(2), lambda _: pytest.fail("written again"), keep=2) == first


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    """A run that never committed starts from the beginning."""
    assert checkpoint.newest(tmp_path / "absent", "r") is None


def test_a_foreign_or_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    """Another run's checkpoint, or one whose state does not read, is an error that names the folder."""
    folder = checkpoint.commit(tmp_path, state(2), write, keep=2)
    with pytest.raises(CheckpointError, match="belongs to run r, this is run other"):
        checkpoint.newest(tmp_path, "other")
    (folder / "state.json").write_text('{"run_id": "r"}')
    with pytest.raises(CheckpointError, match=r"step00000002.*not readable"):
        checkpoint.newest(tmp_path, "r")
