"""A rank ends with the torchrun that started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import wait_for

RANK = """
import os, sys, time
from penstock.trainer.commands.run_command import end_with_torchrun
end_with_torchrun(os.environ)
print(os.getpid(), flush=True)
time.sleep(600)
"""
TORCHRUN = "import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', sys.argv[1]], start_new_session=True)"


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_is_killed_when_torchrun_is(by_torchrun: bool) -> None:
    """Torchrun gives its ranks sessions of their own, and tells nobody when it is killed; a process of a person goes on."""
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environ |= {"TORCHELASTIC_RUN_ID": "one"} if by_torchrun else {}
    command = [sys.executable, "-P", "-c", TORCHRUN, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as torchrun:
        assert torchrun.stdout is not None
        rank = int(torchrun.stdout.readline())
        torchrun.kill()
        torchrun.wait(60.0)
        if by_torchrun:
            wait_for(lambda: not is_going_on(rank), "the end of the rank")
        else:
            assert is_going_on(rank)
            os.kill(rank, 9)


def is_going_on(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
