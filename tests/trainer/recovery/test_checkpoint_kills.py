"""Killed at random moments while ranks write a checkpoint beside training, a run loses and repeats nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.servers import wait_for
from tests.trainer.learner.forks import Command
from tests.trainer.recovery.test_crash_points import GROUPS_PER_STEP, CrashRun, run, scene

from penstock.protocol.record.checkpoint_state import PARTIAL, committed

__all__ = ["run", "scene"]
pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(3600)]

STEPS = 150  # a session between two kills makes about three
LONGEST_DELAY_S = 1.0  # from the first file of a checkpoint: past the acknowledgements, into the next step
NEXT_DELAY_S = 1.0  # until the ranks that are left are killed


def newest(folder: Path) -> int:
    found = committed(folder) if folder.is_dir() else []
    return found[-1][1].step if found else 0


def kill_in_a_checkpoint(trainer: Command, folder: Path, rng: random.Random) -> tuple[int, str]:
    rank = rng.randrange(len(trainer.processes))
    after = newest(folder) + rng.randint(0, 1)

    def is_writing() -> bool:
        assert all(one.poll() is None for one in trainer.processes), (
            f"ended before it was killed\n{trainer.err[-3000:]}"
        )
        return newest(folder) >= after and any(folder.glob(f"step*{PARTIAL}"))

    wait_for(is_writing, "a checkpoint", 240.0)
    step = newest(folder)
    time.sleep(rng.uniform(0.0, LONGEST_DELAY_S))
    pid = trainer.processes[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    where = "before the rename" if newest(folder) == step else "after the rename"
    time.sleep(rng.uniform(0.0, NEXT_DELAY_S))
    trainer.kill()  # as torchrun does with the ranks that are left
    return rank, where


@pytest.mark.parametrize(("num_ranks", "num_kills"), [(1, 25), (2, 30)])
def test_random_kills_while_checkpoints_are_written_change_nothing(
    run: CrashRun, num_ranks: int, num_kills: int
) -> None:
    """The accounting closes after each kill; in the end each group counts once, and a replay holds."""
    rng, kills = random.Random(f"{num_ranks} ranks"), Counter[str]()
    layout = (
        f"trainer.num_ranks={num_ranks}",
        "trainer.zero_stage=2",
        f"trainer.steps={STEPS}",
        "eval.every=0",
        "trainer.max_mismatch=None",
    )
    with run.producer():
        for number in range(num_kills):
            rank, where = kill_in_a_checkpoint(run.start(*layout, num_ranks=num_ranks), run.checkpoints, rng)
            kills[f"rank {rank}, {where}"] += 1
            if newest(run.checkpoints):
                run.assert_balanced((number, rank, where))
            print(f"{time.strftime('%X')} kill {number + 1}: rank {rank}, {where}", flush=True)
        run.start(*layout, num_ranks=num_ranks).wait(deadline_s=900.0)
    train = run.assert_balanced().splits[0]
    assert train.used == STEPS * GROUPS_PER_STEP
    replayed = json.loads(run.start_replay(num_ranks=num_ranks).wait(deadline_s=900.0).splitlines()[-1])
    assert replayed["holds"], replayed
    print(
        f"{num_ranks} rank(s): {sum(kills.values())} kills ({dict(kills)}); groups issued {train.issued}, trained "
        f"{train.used}, dropped {dict(train.dropped)}, trained twice 0, lost {train.dropped.get('lost', 0)}; "
        f"{len(replayed['same'])} versions replayed with the same hash"
    )
