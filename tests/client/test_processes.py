"""The processes that the client starts: how they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client.processes import LocalProcess
from tests.servers import wait_for

# It takes a second to stop, as a run that writes a checkpoint does.
CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(143)))
print("up", flush=True)
time.sleep(600)
"""
CALLER = """
import sys, time
from pathlib import Path
from penstock.client.processes import LocalProcess
folder, how, code = sys.argv[1:]
child = LocalProcess("one", [sys.executable, "-c", code], Path(folder) / "log")
while "up" not in child.last_lines():
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600) if how == "killed" else sys.exit(0)
"""


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_process_ends_with_the_python_that_started_it(tmp_path: Path, how: str) -> None:
    """SIGKILL of the caller ends it in order; a caller that exits by itself waits until it has ended."""
    command = [sys.executable, "-P", "-c", CALLER, str(tmp_path), how, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        if how == "killed":
            caller.kill()
        caller.wait(60.0)
        if how == "exits":
            assert has_ended(pid)
    wait_for(lambda: has_ended(pid), f"the end of process {pid}")


def start(tmp_path: Path, code: str) -> LocalProcess:
    return LocalProcess("one", [sys.executable, "-c", code], tmp_path / "log")


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    """The error has the exit code and the last lines of this process, not those of an earlier one."""
    (tmp_path / "log").write_text("an earlier session\n")
    process = start(tmp_path, "import sys; sys.exit('no such model')")
    assert process.wait(60.0)
    assert process.state == "failed"
    text = str(process.failure("run x"))
    assert text.startswith("run x ended with exit code 1;")
    assert "no such model" in text
    assert "earlier" not in text


def test_a_wait_ends_at_its_deadline_and_a_stop_is_not_a_failure(tmp_path: Path) -> None:
    """A process that goes on is waited for as long as was asked; stopped, it is "stopped"."""
    process = start(tmp_path, "import time; time.sleep(600)")
    assert not process.wait(0.05)
    assert process.state == "running"
    process.stop()
    assert process.wait(0.0)
    assert process.state == "stopped"
