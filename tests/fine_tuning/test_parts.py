"""The parts of a training on given answers: its length, early stop, checkpoints on disk, the lock of its folder."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from penstock.console.report import curves
from penstock.fine_tuning import training_folder
from penstock.fine_tuning.loop import Best
from penstock.fine_tuning.rm import RewardTask, ScoredBatch
from penstock.fine_tuning.session import Length, check_warmup
from penstock.fine_tuning.training_folder import TrainingFolder, TrainingState
from penstock.protocol.errors import ConfigError
from penstock.protocol.record import run_folder
from penstock.trainer.data.pairs import Pair
from penstock.trainer.errors import CheckpointError, RunIsHeld, TrainingDiverged
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings


@examples(50)
@given(rows=st.integers(1, 60), batch=st.integers(1, 20), epochs=st.floats(0.1, 4.0))
def test_epochs_use_every_row_equally_often(rows: int, batch: int, epochs: float) -> None:
    """The steps' positions follow one another from 0 to the last of the epochs; only the last step may be smaller."""
    length = Length.of(rows, batch, steps=7, epochs=epochs)
    used = [position for step in range(length.num_steps) for position in length.positions(step)]
    assert used == list(range(max(1, round(epochs * rows))))
    assert all(len(length.positions(step)) == batch for step in range(length.num_steps - 1))
    assert len(length.positions(length.num_steps - 1)) >= 1
    assert length.epoch_after(length.num_steps) == len(used) / rows


def test_steps_are_all_full() -> None:
    """Without epochs the rows begin again within a batch; a warm-up that is longer than the training is refused."""
    length = Length.of(10, 4, steps=3, epochs=None)
    assert [len(length.positions(step)) for step in range(3)] == [4, 4, 4]
    assert length.epoch_after(3) == 1.2
    with pytest.raises(ConfigError, match=r"sft.warmup_steps = 4, and 10 rows make 3 steps of sft.batch_size = 4"):
        check_warmup("sft", 4, length)
    check_warmup("sft", 3, length)


def test_early_stop_counts_validations_since_the_best() -> None:
    """An equal loss is no better one; 0 never stops; a loss that is no number ends the training."""
    best = Best()
    for step, loss in enumerate([3.0, 2.0, 2.0, 2.5], start=1):
        best = best.after(step, loss)
    assert best == Best(step=2, loss=2.0, num_since=2)
    assert (best.ends(2), best.ends(3), best.ends(0)) == (True, False, False)
    with pytest.raises(TrainingDiverged, match="after step 5 is nan"):
        best.after(5, math.nan)


def write(root: Path, step: int, *, keep: int = 2) -> None:
    def write_files(partial: Path) -> None:
        (partial / "weights.bin").write_bytes(bytes([step]) * 100)

    training_folder.commit(root, state_of(step), write_files, keep=keep)


def state_of(step: int) -> TrainingState:
    return TrainingState(step=step, num_ranks=1, settings={"sft.lr": 0.1}, data={"sft.data": "a"}, metrics_bytes=0)


def test_a_checkpoint_is_whole_or_is_not_there(tmp_path: Path) -> None:
    """One that was being written is removed at the next start; the newest two are kept."""
    assert training_folder.newest(tmp_path) is None
    for step in (1, 2, 3):
        write(tmp_path, step)
    (training_folder.partial_folder(tmp_path, 4)).mkdir()
    found = training_folder.newest(tmp_path)
    assert found is not None
    assert (found[0].name, found[1].step) == ("step00000003", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step00000002", "step00000003"]


def test_a_full_disk_leaves_the_older_checkpoint_and_names_the_fix(tmp_path: Path) -> None:
    """The error names folder and free space; what was written is removed, so that its space is free again."""

    def write_too_much(partial: Path) -> None:
        (partial / "weights.bin").write_bytes(bytes(100))
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"step00000004 could not be written below .*\(OSError.*MB are free"):
        training_folder.commit(tmp_path, state_of(4), write_too_much, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step00000002"]


def test_an_altered_checkpoint_is_refused(tmp_path: Path) -> None:
    """By the name of the file, with the sha256 that was committed; so is a state that is not valid."""
    write(tmp_path, 1)
    file = tmp_path / "step00000001" / "weights.bin"
    file.write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"weights.bin has sha256 .*, expected .*trainer.resume=false"):
        training_folder.newest(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"weights.bin has sha256 \(no file\)"):
        training_folder.newest(tmp_path)
    (tmp_path / "step00000001" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no valid state.json"):
        training_folder.newest(tmp_path)


def test_another_training_does_not_resume_a_checkpoint(tmp_path: Path) -> None:
    """Each setting that differs and other rows are named together; the ZeRO stage may be another one."""
    write(tmp_path, 1)
    found = training_folder.newest(tmp_path)
    assert found is not None
    folder, state = found
    training_folder.check_same(state, folder, settings={"sft.lr": 0.1, "trainer.zero_stage": 3}, data={"sft.data": "a"})
    with pytest.raises(CheckpointError) as caught:
        training_folder.check_same(state, folder, settings={"sft.lr": 0.2}, data={"sft.data": "b"})
    text = str(caught.value)
    assert "sft.lr is 0.2, the checkpoint has 0.1" in text
    assert "sft.data has other rows" in text


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    """A second one is refused while the first is alive; metrics are cut where a checkpoint ends."""
    first = TrainingFolder(tmp_path / "sft-training")
    with pytest.raises(RunIsHeld, match="another process is training there"):
        TrainingFolder(tmp_path / "sft-training")
    first.write("step", {"step": 1})
    length = first.metrics_bytes
    first.write("step", {"step": 2})
    first.rewind(length)
    first.write("step", {"step": 3})
    first.close()
    lines = (tmp_path / "sft-training" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
    TrainingFolder(tmp_path / "sft-training").close()


def test_a_result_counts_until_the_training_begins_again(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path / "sft-training")
    assert not curves.is_training_finished(tmp_path, "sft")
    folder.finish({"num_steps": 3})
    assert curves.is_training_finished(tmp_path, "sft")
    run_folder.request_pause(tmp_path)
    assert folder.is_pause_requested
    folder.rewind(0)
    assert not curves.is_training_finished(tmp_path, "sft")
    folder.close()


def test_a_reward_model_reads_a_prompt_once_for_both_answers() -> None:
    """Although only the last token of a text is scored: the stream has the prompt, then what differs, and no padding."""
    rng = np.random.default_rng(0)
    sizes = [(40, 30, 20), (60, 10, 70), (50, 25, 25)]
    pairs = [Pair(*(rng.integers(1, 60, size).astype(np.int32) for size in three)) for three in sizes]
    taken: list[ScoredBatch] = []

    def train_step(batches: list[ScoredBatch], _: object) -> Any:
        taken.extend(batches)
        sums = {"accuracy": 0.0, "margin": 0.0, "reward_mean": 0.0}
        return SimpleNamespace(sums=sums, maxima={"reward_max": 0.0, "reward_min": 0.0})

    policy: Any = SimpleNamespace(train_step=train_step)
    given: Any = pairs
    settings = TrainerSettings.model_validate({"run": {"id": "rm"}, "model": {"path": "model"}})
    ranks = Ranks.__new__(
        Ranks
    )  # one, without the process group that a second one in this process could not make again
    ranks.rank, ranks.num_ranks = 0, 1
    RewardTask(policy, given, None, settings, ParallelDims(ranks)).step(range(3))
    [batch] = taken
    assert batch.input_ids.shape[1] == sum(map(sum, sizes))
    assert batch.position_ids is not None
    tokens, places = batch.input_ids[0, batch.predictors].tolist(), batch.position_ids[0, batch.predictors].tolist()
    scored = list(zip(tokens, places, strict=True))  # chosen, rejected, chosen, … of the pairs in any order
    expected = [
        tuple((int(answer[-1]), len(pair.prompt) + len(answer) - 1) for answer in (pair.chosen, pair.rejected))
        for pair in pairs
    ]
    assert sorted(zip(scored[0::2], scored[1::2], strict=True)) == sorted(expected)
