"""A rank that hangs without exiting is noticed by the others, which end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.servers import wait_for
from tests.trainer.learner.forks import Fork

from penstock.trainer.rank_orders import HUNG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CHECK = "tests.trainer.learner.rank_watch_check"


@pytest.mark.parametrize("hung", [0, 1])
def test_the_other_rank_ends_when_one_is_suspended(tmp_path: Path, hung: int) -> None:
    """Its process is alive and its connections are open; the error says who does not answer, and the phase and step."""
    ranks = Fork(tmp_path, CHECK, "3", num_ranks=2)
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
    ranks = Fork(tmp_path, CHECK, "0", num_ranks=2)
    try:
        ranks.wait()
    finally:
        ranks.kill()
    assert "hangs" not in ranks.err
