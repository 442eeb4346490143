"""Processes of a service that cost little to start, so that a test can kill several of them.

``python -P -m tests.forked MODULE PRELOADED...`` imports the modules once; for each line on stdin it forks a process that
runs ``MODULE.main()`` with the line's arguments, and answers with its process id.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.servers import wait_for

ROOT = Path(__file__).resolve().parents[1]


class Forked:
    """One module's processes; use as a context manager, which ends them all."""

    def __init__(self, module: str, *preloaded: str, log: Path) -> None:
        """Import the modules in a process whose output, and that of its children, goes to ``log``."""
        self.log = log
        self._pids: list[int] = []
        with log.open("ab") as file:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", module, *preloaded],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Forked:
        return self

    def start(self, *arguments: str) -> int:
        """Start a process and return its id."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(arguments) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, self.log.read_text()
        self._pids.append(int(line))
        return self._pids[-1]

    def kill(self, pid: int) -> None:
        """SIGKILL a process, and wait for its end."""
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> None:
        """Wait until a process has ended."""
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}: {self.log}")
        self._pids.remove(pid)

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        for pid in list(self._pids):
            if Path(f"/proc/{pid}").exists():
                self.kill(pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()
        if kind is not None:
            sys.stdout.write(self.log.read_text()[-6000:])


def main(module: str, preloaded: Sequence[str]) -> None:
    """Fork a process for each line."""
    run = importlib.import_module(module).main
    for name in preloaded:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = [module, *json.loads(line)]
            os._exit(run() or 0)
        os.write(answers, f"{pid}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
