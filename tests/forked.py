"""Processes that cost little to start, so that a test can start and kill several of them.

A fork server imports modules once, and forks a process for each request to start one, which runs the ``main()`` of a module
and is killed when the process that asked for it ends. All processes of pytest share the fork servers; the last one ends them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers import wait_for

ROOT = Path(__file__).resolve().parents[1]
_READ_AT_THE_START = ("LD_PRELOAD", "PYTHONPATH")  # variables that a forked process comes too late for
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from tests import forked; forked.serve(sys.argv[2], sys.argv[3:])"
)


@functools.cache
def shared() -> tuple[Path, int]:
    """Return the folder of the sockets of all fork servers, and what they read until no process of pytest is left.

    Processes that are forked after the first call share both.
    """
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lifeline, _ = os.pipe()
    return folder, lifeline


def _connected(modules: Sequence[str]) -> socket.socket:
    """Connect to the fork server that has imported the modules; start it if none has."""
    folder, lifeline = shared()
    address = folder / hashlib.sha256(" ".join(modules).encode()).hexdigest()[:12]
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            log = (f"{address}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-c", _PROGRAM, str(ROOT), str(address), *modules],
                {**os.environ, "OMP_NUM_THREADS": "1"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, lifeline, 0), (os.POSIX_SPAWN_OPEN, 1, *log), (os.POSIX_SPAWN_DUP2, 1, 2)
                ],
                setsid=True,
            )  # fmt: skip
            wait_for(address.exists, f"the fork server of {modules}: {address}.log")
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(str(address))
    return connected


@dataclass(frozen=True)
class Own:
    """What a process has of its own."""

    module: str
    log: str
    err: str
    environ: dict[str, str]
    cwd: str
    new_session: bool


class Forked:
    """One module's processes; use as a context manager, which ends them all."""

    def __init__(self, module: str, *preloaded: str, log: Path) -> None:
        """Fork from a process that has imported the modules; output goes to ``log``, unless a process has its own."""
        self.log = log
        self._module = module
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._socket = _connected((module, *preloaded))
        self._answers = self._socket.makefile()

    def __enter__(self) -> Forked:
        return self

    def _ask(self, request: Any) -> Any:
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._answers.readline()
        assert line, f"the fork server has ended: {shared()[0]}"
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
        out = (log or self.log).absolute()
        own = Own(
            module=self._module,
            log=str(out),
            err=str(out if err is None else err.absolute()),
            environ=dict(os.environ if environ is None else environ),
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

    def wait(self, pid: int, deadline_s: float = 180.0) -> int:
        """Return the exit code of a process when it has ended; raises TimeoutExpired after a deadline."""
        process = os.pidfd_open(pid)
        try:
            if not select.select([process], [], [], deadline_s)[0]:
                raise subprocess.TimeoutExpired(f"process {pid}: {self.log}", deadline_s)
        finally:
            os.close(process)
        code = self.poll(pid)
        assert code is not None
        return code

    def close(self) -> None:
        for pid in list(self._running):
            if self.poll(pid) is None:
                self.kill(pid)
        self._answers.close()
        self._socket.close()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close()
        if kind is not None and self.log.exists():
            sys.stdout.write(self.log.read_text()[-6000:])


class ForkedProcess:
    """One process of a ``Forked`` that lasts as long as this one; has the methods of ``subprocess.Popen`` that tests use."""

    stdin = None

    def __init__(
        self,
        module: str,
        *preloaded: str,
        arguments: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        err: Path | None = None,
        new_session: bool = False,
    ) -> None:
        """Start it with a whole environment; its output is appended to ``log``."""
        self._lock = threading.Lock()
        self._forked = _kept(module, *preloaded)
        self.pid = self._forked.start(*arguments, log=log, err=err, environ=environ, new_session=new_session)
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
        """Return the exit code when the process has ended; raises TimeoutExpired."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._forked.wait(self.pid, 600.0 if timeout is None else timeout)
            return self.returncode

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
        try:
            code = forked.wait(pid, deadline_s)
        except subprocess.TimeoutExpired:
            forked.kill(pid)
            raise subprocess.TimeoutExpired(list(arguments), deadline_s, out.read_text(), err.read_text()) from None
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())


@functools.cache
def _kept(module: str, *preloaded: str) -> Forked:
    forked = Forked(module, *preloaded, log=Path(os.devnull))
    atexit.register(forked.close)
    return forked


def serve(address: str, modules: Sequence[str]) -> None:
    """Import modules, and fork a process for each request until stdin is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    Path(f"{address}.new").rename(address)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else collections of every process would look through, and so copy, what all of them share
    _Server(listener).serve()


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[socket.socket, set[int]] = {}  # with their processes
        self._ready = selectors.DefaultSelector()

    def serve(self) -> None:
        for file in (0, self._listener):
            self._ready.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in self._ready.select():
                if key.fileobj == 0:
                    for client in list(self._clients):
                        self._leave(client)
                    return
                if key.fileobj is self._listener:
                    client = self._listener.accept()[0]
                    self._clients[client] = set()
                    self._ready.register(client, selectors.EVENT_READ, client.makefile("rb"))
                elif line := key.data.readline():
                    self._answer(key.fileobj, json.loads(line))
                else:
                    self._leave(key.fileobj)

    def _leave(self, client: Any) -> None:
        for pid in self._clients.pop(client):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._ready.unregister(client)
        client.close()

    def _answer(self, client: Any, request: Any) -> None:
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            if pid:
                self._clients[client].remove(pid)
            _send(client, os.waitstatus_to_exitcode(status) if pid else None)
        elif pid := os.fork():
            self._clients[client].add(pid)
        else:
            arguments, own = request[0], Own(**request[1])
            try:
                _become(arguments, own)
            except OSError as err:  # no such folder
                _send(client, str(err))
                raise
            _send(client, os.getpid())
            self._ready.close()
            for file in (self._listener, *self._clients):
                file.close()
            _run_main(own.module)


def _run_main(module: str) -> None:
    """End this process as the module's ``main`` says, without the time that it takes to delete every module."""
    try:
        code = importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code
    except Exception:  # noqa: BLE001 printed as an interpreter does
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _send(client: socket.socket, value: int | str | None) -> None:
    client.sendall(f"{json.dumps(value)}\n".encode())


def _become(arguments: Sequence[str], own: Own) -> None:
    """Take the arguments, output, environment and session of the process that a command line would have started."""
    sys.argv = [own.module, *arguments]
    if own.new_session:
        os.setsid()
    os.chdir(own.cwd)
    _open(os.devnull, os.O_RDONLY, 0)
    _open(own.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1)
    _open(own.err, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 2)
    os.environ.clear()
    os.environ.update(own.environ)
    time.tzset()


def _open(path: str, flags: int, number: int) -> None:
    file = os.open(path, flags, 0o644)
    os.dup2(file, number)
    os.close(file)
