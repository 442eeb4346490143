"""The process that runs a command of a run, records its start and its end, and passes signals on.

    python -m penstock.console.web.launchers.run_process FOLDER START COMMAND...

It holds the lock ``launch.lock`` of the run's folder, and so does the command: the kernel releases it when both have ended.
Therefore a run is known to be running, without a process id that another process may have by now, and a second process for
the same run ends at once. ``launch.json`` has the pids, the time and the exit code. It needs nothing of the API, and goes on when
that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from penstock.protocol.files import atomic_write

LOCK = "launch.lock"
LAUNCH = "launch.json"
ALREADY_RUNNING = 75  # EX_TEMPFAIL


def main(arguments: list[str]) -> int:
    folder, start, command = Path(arguments[0]), int(arguments[1]), arguments[2:]
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ALREADY_RUNNING
    record: dict[str, object] = {
        "start": start,
        "pid": os.getpid(),
        "pid_started": started_ticks(os.getpid()),
        "host": socket.gethostname(),
        "started_at": time.time(),
    }
    early: list[int] = []  # signals that came before the command was started
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    _store(folder, record)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(handle,), start_new_session=True)
    for number in early:
        forward(number, None)
    _store(folder, record := {**record, "child": child.pid, "child_started": started_ticks(child.pid)})
    code = child.wait()
    _store(folder, {**record, "ended_at": time.time(), "exit_code": code})
    return code if code >= 0 else 128 - code


def started_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: with it, a pid names one process. 0: no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _store(folder: Path, record: dict[str, object]) -> None:
    atomic_write(folder / LAUNCH, json.dumps(record), sync=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
