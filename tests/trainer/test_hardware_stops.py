"""A training that runs out of memory, or loses its GPU or a rank, ends with that name and its batch, and is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.fine_tuning.trl_rows import write_pairs
from tests.protocol.test_hardware_errors import ASYNC, OOM
from tests.trainer.learner.forks import Command
from tests.trainer.test_trainer_loop import unbootstrapped
from tests.trainer.trained_run import Run

from penstock.protocol.record.stopped_batch import read_batch

__all__ = ["unbootstrapped"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LOSSES = f"""
import os
import torch
from penstock.trainer.algorithm.losses.interface import *
from penstock.trainer.algorithm.preferences.interface import preference_loss

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.AcceleratorError({"CUDA error: uncorrectable ECC error encountered" + ASYNC!r})

def terms(tokens, log_ratio):
    ratio = tokens.log_ratio.detach().exp()
    return LossTerms(-tokens.advantages * log_ratio, ratio, none_of(ratio), none_of(ratio))

@policy_loss(source="none")
def forward(tokens):
    raise torch.OutOfMemoryError({OOM!r})

@policy_loss(source="none")
def backward(tokens):
    return terms(tokens, Broken.apply(tokens.log_ratio))

@policy_loss(source="none")
def second_rank(tokens):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError({OOM!r})
    return terms(tokens, tokens.log_ratio)

@preference_loss(source="none")
def unpaired(pairs):
    raise torch.OutOfMemoryError({OOM!r})

@policy_loss(source="none")
def mistaken(tokens):
    raise RuntimeError("a mistake")
"""


@pytest.fixture
def run(unbootstrapped: Run, run_streams: str) -> Iterator[Run]:
    run = replace(unbootstrapped, id=run_streams)
    (run.folder / "mine.py").write_text(LOSSES)
    yield run
    for session in run.sessions:
        session.kill()


def test_errors_of_the_hardware_save_the_batch_and_a_resume_continues(run: Run) -> None:
    """In the forward or the backward pass; another RuntimeError of a step is an internal error as before."""
    run.write(steps=1)
    said = {
        "forward": r"out of GPU memory on GPU 3 (22.78 GiB requested, 12.73 GiB of 79.11 GiB free, 14.72 GiB in use by",
        "backward": "the GPU reports a hardware error (AcceleratorError: CUDA error: uncorrectable ECC error encounter",
    }
    folder = run.home / "stopped" / "step00000001"
    with run.producer():
        for loss, line in said.items():
            stopped = run.start(f"algorithm.loss={run.folder / 'mine.py'}:{loss}")
            stopped.wait(expected=2)
            assert line in stopped.err.splitlines()[-1]
            assert f"The batch of step 1 is saved in {folder}: `penstock runs stopped {run.id}` shows it" in stopped.err
            assert "internal error" not in stopped.err
            batch, groups = read_batch(folder)
            assert (batch.error, batch.step, len(groups)) == ("HardwareFailed", 1, 4)
            assert ("tokens)" in batch.reason) == (loss == "forward")
        mistaken = run.start(f"algorithm.loss={run.folder / 'mine.py'}:mistaken")
        mistaken.wait(expected=1)
        run.start().wait()
    assert [row["step"] for row in run.steps()] == [1]


def test_a_rank_that_ends_is_named_by_itself_and_by_rank_0(run: Run) -> None:
    run.write(steps=1, trainer={"zero_stage": 2, "num_ranks": 2})
    with run.producer():
        stopped = run.start(f"algorithm.loss={run.folder / 'mine.py'}:second_rank", num_ranks=2)
        stopped.wait(expected=2)
    assert "\nout of GPU memory on GPU 3, rank 1 (22.78 GiB requested" in stopped.err
    assert "another rank exited, or its connection broke on rank 0 (" in stopped.err
    assert read_batch(run.home / "stopped" / "step00000001")[0].error == "HardwareFailed"
    assert "internal error" not in stopped.err


def test_fine_tuning_names_them_and_goes_on_from_its_checkpoint(unbootstrapped: Run) -> None:
    folder = unbootstrapped.folder
    (folder / "mine.py").write_text(LOSSES)
    write_pairs(folder / "pairs.jsonl")
    settings = (
        f"run.dir={folder / 'runs'}", "run.id=dpo", f"model.path={folder / 'model'}",
        f"dpo.data={folder / 'pairs.jsonl'}",
        "dpo.batch_size=2", "dpo.steps=1", "trainer.micro_batch_tokens=512",
    )  # fmt: skip
    stopped = Command(folder, "dpo", *settings, f"dpo.loss={folder / 'mine.py'}:unpaired")
    stopped.wait(expected=2)
    assert stopped.err.splitlines()[-1].startswith(
        "out of GPU memory on GPU 3 (22.78 GiB requested, 12.73 GiB of 79.11 GiB"
    )
    assert "Traceback" in stopped.err
    Command(folder, "dpo", *settings).wait()
