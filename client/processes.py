"""The process of a run or a training on this machine: started, stopped, and ended with this Python process.

When this process ends, by SIGKILL too, the kernel sends SIGTERM to the one started here, which stops what it started in order
(`deploy/processes/child.py`). At a normal exit this process waits for that.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Literal

from penstock.deploy.processes.child import Child, describe_exit, wait_until
from penstock.protocol.errors import PenstockError

# Of a run on this machine: running, pausing, paused, finished, stopped, failed. The Runs API has the others too.
State = Literal[
    "created", "queued", "waiting", "running", "pausing", "paused", "stopping", "stopped", "failed", "finished"
]

GOING_ON: tuple[State, ...] = ("queued", "waiting", "running", "pausing", "stopping")
STOP_S = 60.0  # services stop in order, and the trainer writes a checkpoint
_TERMINATED = (130, 143, -SIGTERM)  # exit codes of a process that was stopped on request
POLL_S = 0.05

_started: list[LocalProcess] = []


class RunFailed(PenstockError):
    """A run or a training ended with an error; the text has the last lines of its log."""


class LocalProcess:
    """One process of a run or a training, in a separate session, so that Ctrl-C does not reach it."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start it; its output is appended to ``log``. Raises DeployError when it cannot be started."""
        self.name = name
        self.log = log
        self._started_at_byte = log.stat().st_size if log.exists() else 0
        self._child = Child(name, command, log=log, environ=dict(os.environ), death_signal=SIGTERM)
        self._child.start()
        _started[:] = [*(process for process in _started if process.state == "running"), self]

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._child.returncode

    @property
    def state(self) -> State:
        code = self._child.returncode
        if code is None:
            return "running"
        if code == 0:
            return "finished"
        return "stopped" if code in _TERMINATED else "failed"

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it exits; returns False when ``timeout_s`` passed first."""
        return wait_until(lambda: self._child.returncode is not None, timeout_s, POLL_S)

    def ask_to_stop(self) -> None:
        self._child.ask_to_stop()

    def stop(self) -> None:
        """Stop it in order, and kill it and what it started when that takes longer than `STOP_S`; idempotent."""
        self._child.stop(STOP_S)

    def failure(self, what: str) -> RunFailed:
        code = self._child.returncode
        end = "is still running" if code is None else f"ended with {describe_exit(code)}"
        return RunFailed(f"{what} {end}; {self.log} ends with\n{self.last_lines()}")

    def last_lines(self) -> str:
        return "\n".join(f"    {line}" for line in self.output(16_384)[-15:]) or "    (nothing)"

    def output(self, max_bytes: int) -> list[str]:
        """Return the lines among the last bytes that this process wrote; the first may be a part of one."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._started_at_byte, self.log.stat().st_size - max_bytes))
                return file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


@atexit.register
def stop_all() -> None:
    """Stop every process that still runs, all at the same time."""
    running = [process for process in _started if process.state == "running"]
    for process in running:
        process.ask_to_stop()
    for process in running:
        process.stop()
