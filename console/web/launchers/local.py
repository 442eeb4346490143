"""A process on this machine, in a separate session: it goes on when the API is killed, and is found by the lock it holds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from penstock.console.web.jobs import job_file
from penstock.console.web.launchers.launcher import Found, Launcher, Start
from penstock.console.web.launchers.run_process import LOCK, started_ticks
from penstock.console.web.problems import Problem
from penstock.protocol.record.run_folder import is_locked

LOG = "launch.log"
_START_S = 10.0


class LocalOptions(BaseModel):
    """The local launcher has no options."""

    model_config = ConfigDict(extra="forbid")


class Local(Launcher):
    name = "local"
    uses_this_machine = True
    options = LocalOptions

    def start(self, start: Start) -> str:
        """Start the process, and return when it holds the run's lock."""
        logs = start.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / LOG).open("ab") as log:
            process = subprocess.Popen(
                start.process,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(start.environ),
                cwd=start.directory,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while (launch := job_file.read_launch(start.folder)) is None or launch.start < start.number:
            if (code := process.poll()) is not None or time.monotonic() > deadline:
                what = f"ended with exit code {code}" if code is not None else f"did not begin within {_START_S:.0f} s"
                raise Problem(409, f"the process of run {start.run} {what}", fix=f"read {logs / LOG}")
            time.sleep(0.02)
        # Waited for in a thread: a process that ended is not left as a zombie, and no warning is printed for it.
        import threading  # noqa: PLC0415

        threading.Thread(target=process.wait, name="reap", daemon=True).start()
        return str(process.pid)

    def find(self, folder: Path, options: BaseModel, handle: str) -> Found:
        """Return whether a process holds the run's lock."""
        return Found("running") if is_locked(folder / LOCK) else Found("absent")

    def stop(self, folder: Path, options: BaseModel, handle: str, *, force: bool) -> None:
        """Send SIGINT, or with ``force`` SIGKILL, to the process that holds the lock."""
        launch = job_file.read_launch(folder)
        if launch is None or not is_locked(folder / LOCK):
            return
        if force:  # the process of the run itself: its children end with it, and run_process records its end
            send(launch.child, launch.child_started, signal.SIGKILL)
        elif not send(launch.pid, launch.pid_started, signal.SIGINT):
            send(launch.child, launch.child_started, signal.SIGINT)  # run_process was killed


LOCAL = Local()


def send(pid: int, started: int, number: int) -> bool:
    """Send a signal to the process that had a pid at a time; False when that one has ended."""
    if pid <= 0:
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
