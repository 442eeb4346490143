"""Killed at random while a thread writes checkpoints, a training on given answers gives the weights of a whole one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.fine_tuning.check import LONG_STEPS
from tests.fine_tuning.test_fine_tuning import check_same, folder
from tests.servers import wait_for
from tests.trainer.learner.forks import Fork

from penstock.protocol.record.checkpoint_state import PARTIAL

__all__ = ["folder"]
pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(3600)]

LONGEST_DELAY_S = 0.5  # from the first file of a checkpoint: past its rename, into later steps


def newest(checkpoints: Path) -> int:
    names = [path.name for path in checkpoints.glob("step*") if not path.name.endswith(PARTIAL)]
    return max((int(name.removeprefix("step")) for name in names), default=0)


def kill_while_it_writes(fork: Fork, checkpoints: Path, rng: random.Random) -> str:
    after = newest(checkpoints) + rng.randint(0, 2)

    def is_writing() -> bool:
        assert all(one.poll() is None for one in fork.processes), f"ended before it was killed\n{fork.err[-3000:]}"
        return newest(checkpoints) >= after and any(checkpoints.glob(f"step*{PARTIAL}"))

    wait_for(is_writing, "a checkpoint", 240.0)
    step, rank = newest(checkpoints), rng.randrange(len(fork.processes))
    time.sleep(rng.uniform(0.0, LONGEST_DELAY_S) * rng.random())
    pid = fork.processes[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    where = "before the rename" if newest(checkpoints) == step else "after a rename"
    fork.kill()  # as torchrun does with the ranks that are left
    return f"rank {rank}, {where}"


@pytest.mark.parametrize(("num_ranks", "num_kills"), [(1, 25), (2, 25)])
def test_random_kills_while_checkpoints_are_written_change_nothing(
    folder: Path, num_ranks: int, num_kills: int
) -> None:
    """Each start continues from the last whole checkpoint; lines and weights are those of an uninterrupted training."""

    def start(name: str) -> Fork:
        return Fork(folder, "tests.fine_tuning.check", str(folder), f"long@{name}-{num_ranks}", num_ranks=num_ranks)

    def finished(fork: Fork) -> dict[str, Any]:
        return json.loads(fork.wait(deadline_s=900.0).splitlines()[-1])["long"]

    whole = finished(start("whole"))
    checkpoints = folder / "runs" / f"parted-{num_ranks}" / "sft-training" / "checkpoints"
    rng, kills = random.Random(f"{num_ranks} ranks"), Counter[str]()
    for number in range(num_kills):
        fork = start("parted")
        try:
            kills[kill_while_it_writes(fork, checkpoints, rng)] += 1
        finally:
            fork.kill()
        print(f"{time.strftime('%X')} kill {number + 1}: newest checkpoint {newest(checkpoints)}", flush=True)
    assert newest(checkpoints) < LONG_STEPS - 1, "nothing was left to train"
    check_same(finished(start("parted")), whole)
    print(
        f"{num_ranks} rank(s): {sum(kills.values())} kills ({dict(kills)}); {LONG_STEPS} steps, same lines and weights"
    )
