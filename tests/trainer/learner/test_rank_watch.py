"""A rank that hangs without exiting is noticed by the others, which end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.servers import wait_for
from tests.trainer.learner.forks import Fork

from penstock.trainer.rank_orders import HUNG, RankActivity, RankWatch, answer_watch, end_process
from penstock.trainer.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_MEETINGS = 50


def main(arguments: Sequence[str]) -> int:
    """Meet until the end if the argument, a deadline in seconds, is 0; else until a rank hangs."""
    given = float(arguments[0])
    ranks, activity = Ranks(), RankActivity()
    channel, deadline_s = ranks.channel(), given or 60.0
    watch = RankWatch(channel, activity, deadline_s, end_process)
    if ranks.is_leader:
        watch.__enter__()
    else:
        answer_watch(channel, activity, deadline_s, end_process)
    meeting = 0
    while given or meeting < NUM_MEETINGS:
        activity.begin("meeting", meeting)
        ranks.barrier()
        meeting += 1
        if meeting == NUM_MEETINGS:
            sys.stdout.write(f"met {ranks.rank}\n")
            sys.stdout.flush()
        time.sleep(0.02)
    if ranks.is_leader:
        watch.__exit__()
    ranks.leave(0)
    return 0


@pytest.mark.parametrize("hung", [0, 1])
def test_the_other_rank_ends_when_one_is_suspended(tmp_path: Path, hung: int) -> None:
    """Its process is alive and its connections are open; the error says who does not answer, and the phase and step."""
    ranks = Fork(tmp_path, __name__, "3", num_ranks=2)
    try:
        wait_for(lambda: ranks.out.count("met") == 2, "both ranks")
        pid = ranks.processes[hung].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ranks.processes[1 - hung].wait(60.0)
        assert ranks.processes[1 - hung].returncode == HUNG, ranks.err
        assert ranks.processes[hung].poll() is None
    finally:
        ranks.kill()
    assert f"rank {hung} of 2 has exited, or did not answer for 3 s" in ranks.err
    assert "`meeting` after step " in ranks.err


def test_ranks_that_answer_end_when_they_are_done(tmp_path: Path) -> None:
    """The end of the watch is told: no rank takes the exit of rank 0 for a hang."""
    ranks = Fork(tmp_path, __name__, "0", num_ranks=2)
    try:
        ranks.wait()
    finally:
        ranks.kill()
    assert "hangs" not in ranks.err
