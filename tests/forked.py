"""Processes of a service that cost little to start, so that a test can start and kill several of them.

``python -m tests.forked MODULE PRELOADED...`` imports the modules once. It answers each line on stdin: a request to start
forks a process that runs ``MODULE.main()``, and is answered with its process id; an id, with its exit code once it ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers import wait_for

ROOT = Path(__file__).resolve().parents[1]
_READ_AT_THE_START = ("LD_PRELOAD", "PYTHONPATH")  # variables that a forked process comes too late for


@dataclass(frozen=True)
class Own:
    log: str | None
    err: str | None
    environ: dict[str, str] | None
    cwd: str
    new_session: bool


class Forked:
    """One module's processes; use as a context manager, which ends them all."""

    def __init__(self, module: str, *preloaded: str, log: Path) -> None:
        """Import the modules in a process whose output, and that of its children, goes to ``log``."""
        self.log = log
        self._lock = threading.Lock()
        self._running: set[int] = set()
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

    def _ask(self, request: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            line = self._server.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def start(
        self,
        *arguments: str,
        log: Path | None = None,
        err: Path | None = None,
        environ: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        new_session: bool = False,
    ) -> int:
        """Start a process and return its id; what is given is its own: log, log of its stderr, environment, session."""
        own = Own(
            log=None if log is None else str(log.absolute()),
            err=None if err is None else str(err.absolute()),
            environ=None if environ is None else dict(environ),
            cwd=str(cwd),
            new_session=new_session,
        )
        pid = self._ask([arguments, asdict(own)])
        assert isinstance(pid, int), f"not started: {pid}"
        self._running.add(pid)
        return pid

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a process, negative for a signal; None while it runs. Not to be asked again after it."""
        code = self._ask(pid)
        if code is not None:
            self._running.remove(pid)
        return code

    def kill(self, pid: int) -> None:
        """SIGKILL a process, and wait for its end."""
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> None:
        wait_for(lambda: self.poll(pid) is not None, f"the end of process {pid}: {self.log}")

    def close(self) -> None:
        for pid in list(self._running):
            if self.poll(pid) is None:
                self.kill(pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(60.0)
        self._server.stdout.close()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close()
        if kind is not None:
            sys.stdout.write(self.log.read_text()[-6000:])


class ForkedProcess:
    """One process of a ``Forked`` that lasts as long as this one; has the methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self,
        module: str,
        *preloaded: str,
        arguments: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        cwd: Path = ROOT,
        new_session: bool = False,
    ) -> None:
        """Start it with a whole environment; its output is appended to ``log``."""
        self._lock = threading.Lock()
        self._forked = _kept(module, *preloaded)
        self.pid = self._forked.start(*arguments, log=log, environ=environ, cwd=cwd, new_session=new_session)
        self.returncode: int | None = None

    @staticmethod
    def can_have(environ: Mapping[str, str]) -> bool:
        return not any(environ.get(name) for name in _READ_AT_THE_START)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._forked.poll(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (600.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}: {self._forked.log}", timeout or 600.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str, *preloaded: str, arguments: Sequence[str], cwd: Path, environ: Mapping[str, str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-forked-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        forked = _kept(module, *preloaded)
        pid = forked.start(*arguments, log=out, err=err, cwd=cwd, environ=environ)
        deadline = time.monotonic() + deadline_s
        while (code := forked.poll(pid)) is None:
            if time.monotonic() > deadline:
                forked.kill(pid)
                raise subprocess.TimeoutExpired(list(arguments), deadline_s, out.read_text(), err.read_text())
            time.sleep(0.005)
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())


@functools.cache
def _kept(module: str, *preloaded: str) -> Forked:
    folder = tempfile.TemporaryDirectory(prefix="penstock-test-forked-")
    forked = Forked(module, *preloaded, log=Path(folder.name) / "log")
    atexit.register(folder.cleanup)
    atexit.register(forked.close)
    return forked


def main(module: str, preloaded: Sequence[str]) -> None:
    """Answer each line; in a forked process, end with it."""
    command = importlib.import_module(module).main
    for name in preloaded:
        importlib.import_module(name)
    gc.freeze()
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            _answer(answers, os.waitstatus_to_exitcode(status) if pid else None)
        elif os.fork() == 0:
            try:
                _become(module, request[0], Own(**request[1]))
            except OSError as err:  # no such folder
                _answer(answers, str(err))
                raise
            _answer(answers, os.getpid())
            os.close(answers)
            sys.exit(command())


def _answer(file: int, value: int | str | None) -> None:
    os.write(file, f"{json.dumps(value)}\n".encode())


def _become(module: str, arguments: Sequence[str], own: Own) -> None:
    """Take the arguments, output, environment and session of the process that a command line would have started."""
    sys.argv = [module, *arguments]
    if own.new_session:
        os.setsid()
    os.chdir(own.cwd)
    _open(os.devnull, os.O_RDONLY, 0)
    if own.log is not None:
        _open(own.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1)
        _open(own.err or own.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 2)
    if own.environ is not None:
        os.environ.clear()
        os.environ.update(own.environ)
        time.tzset()


def _open(path: str, flags: int, number: int) -> None:
    file = os.open(path, flags, 0o644)
    os.dup2(file, number)
    os.close(file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
