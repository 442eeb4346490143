"""Trainer processes that start fast: a fork server has loaded all modules, and each process is forked from it.

Each has its own pid to stop and to kill, and shares nothing but the loaded code. Several ranks use a store that the
test holds, as torchrun's agent does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path

from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.trainer.learner.loaded", "tests.trainer.learner.forks"])


def _run_alone(log: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    _run("penstock.trainer.__main__", log, log, arguments, environ)


def _run(module: str, out: str, err: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    for number, path in ((1, out), (2, err)):
        with Path(path).open("a") as file:
            os.dup2(file.fileno(), number)
    assert "tests.trainer.learner.loaded" in sys.modules, "the fork server could not load tests.trainer.learner.loaded"
    os.environ.update(environ)
    import torch

    torch.set_num_threads(1)
    code = import_module(module).main(arguments)
    sys.stdout.flush()
    sys.exit(code)


class Fork:
    """Runs the ``main`` of a module with arguments in one process, or in one for each rank."""

    def __init__(self, folder: Path, module: str, *arguments: str, num_ranks: int = 1) -> None:
        """Start it; its output goes to files in ``folder``."""
        name = os.urandom(3).hex()
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        for path in (self._out, self._err):
            path.touch()
        environ: dict[str, str] = {}
        if num_ranks > 1:
            self._store = TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
            )
            environ = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(num_ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        self.processes = []
        for rank in range(num_ranks):
            own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else environ
            given = (module, str(self._out), str(self._err), arguments, own)
            self.processes.append(_CONTEXT.Process(target=_run, args=given, daemon=True))
            self.processes[-1].start()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def signal(self, number: signal.Signals) -> None:
        pid = self.processes[0].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self, expected: int = 0, deadline_s: float = 300.0) -> str:
        """Wait for the exit and return stdout; fails with its output for another exit code (-9: killed)."""
        for process in self.processes:
            process.join(deadline_s)
        codes = [process.exitcode for process in self.processes]
        assert codes == [expected] * len(codes), f"exit codes {codes}\n{self.out[-4000:]}{self.err[-4000:]}"
        return self.out

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(60.0)


_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "replay": ("forensics.replay",),
    **{name: ("fine_tuning", name) for name in ("sft", "dpo", "rm")},
}


class Command(Fork):
    """``python -m penstock.trainer ...``, or the package above it that has the command."""

    def __init__(self, folder: Path, command: str, *arguments: str, num_ranks: int = 1) -> None:
        """Start it; its output goes to files in ``folder``."""
        package, *given = _PROGRAMS.get(command, ("trainer", command))
        super().__init__(folder, f"penstock.{package}.__main__", *given, *arguments, num_ranks=num_ranks)


class ForkedTrainer:
    """``python -m penstock.trainer ...`` in a session of its own; has the methods of ``subprocess.Popen`` that a `Child` uses."""

    stdin = None

    def __init__(self, arguments: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> None:
        """Start it with a whole environment; its output is appended to ``log``."""
        self._lock = threading.Lock()
        given = (str(log), list(arguments), dict(environ))
        self._process = _CONTEXT.Process(target=_run_alone, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            self._process.join(timeout)
            if (code := self._process.exitcode) is None:
                raise subprocess.TimeoutExpired(f"trainer {self.pid}", timeout or 0.0)
            return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
