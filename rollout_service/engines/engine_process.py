"""An engine as a child process: start, CPU time, end, log; and one that imports what it needs before there are weights.

A worker starts a prepared process at once, so that the seconds of its imports pass while the trainer starts, or while
the weights are fetched. It ends when the worker does: its stdin is then closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol import parent_death
from penstock.protocol.hardware_errors import fault_in
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineUnreachable


@dataclass(frozen=True, slots=True)
class Inherited:
    """What the process of an engine has of its worker."""

    environ: Mapping[str, str] | None = None  # its whole environment; None: the worker's
    files: Sequence[int] = ()  # open files


NOTHING_MORE = Inherited()
LaunchCommand = Callable[[Path, PolicyVersion, Path], list[str]]  # model folder, version, port file → command
_NOT_PASSED = ("PYTHON", "PENSTOCK_", "VIRTUAL_ENV")  # the worker's import path, its passwords, its environment
_POLL_S = 0.02
_STOP_S = 5.0
_TAIL_BYTES = 4000


async def _started(
    words: Sequence[str], stdin: int, log: Path, inherited: Inherited
) -> tuple[asyncio.subprocess.Process, int]:
    """Start a process whose output goes to the end of the log; return it, and the bytes of the log before."""
    with log.open("ab") as output:
        log_start = output.tell()
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=inherited.environ,
            pass_fds=inherited.files,
            start_new_session=True,  # Ctrl-C reaches the worker only, which stops it after the packs in flight
        )
        return process, log_start


class PreparedProcess:
    """A process started with a program's words and one flag; it reads the other words from stdin, as a JSON line."""

    def __init__(self, process: asyncio.subprocess.Process, words: Sequence[str], log_start: int) -> None:
        self._process = process
        self._program = list(words[:-1])
        self.log_start = log_start  # bytes of the log before it wrote to it

    @classmethod
    async def start(cls, words: Sequence[str], *, log: Path, inherited: Inherited) -> PreparedProcess:
        """Start it; its output goes to the end of the log."""
        process, log_start = await _started(words, asyncio.subprocess.PIPE, log, inherited)
        return cls(process, words, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def become(self, command: Sequence[str]) -> asyncio.subprocess.Process | None:
        if list(command[: len(self._program)]) != self._program:
            await self.stop()
            return None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command[len(self._program) :]).encode() + b"\n")
            await self._process.stdin.drain()
            self._process.stdin.close()
        except ConnectionError:
            await self.stop()
            return None
        return None if self._process.returncode is not None else self._process

    async def stop(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


def with_parent(parent_pid: int, port_file: Path) -> list[str]:
    """Return the words before a program that ends with this worker and gets a port; see `protocol/parent_death.py`."""
    return parent_death.command_words(parent_pid, port_file=port_file)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what belongs to the worker: its import path, its settings, its passwords.

    The engine imports nothing from the working directory: PYTHONSAFEPATH is ``-P``, which a Python 3.10 does not have.
    """
    return {name: value for name, value in environ.items() if not name.startswith(_NOT_PASSED)} | {
        "PYTHONSAFEPATH": "1"
    }


class EngineProcess:
    """One process of an engine. It leads a separate process group, which is killed when it exits."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_start: int, kind: str = "") -> None:
        self._process = process
        self._kind = kind  # such as sglang
        self._log = log
        self._log_start = log_start
        self._members = [process.pid]
        self._group_ended = False

    @classmethod
    async def start(
        cls,
        command: LaunchCommand,
        folder: Path,
        version: PolicyVersion,
        *,
        log: Path,
        deadline_s: float,
        inherited: Inherited = NOTHING_MORE,
        prepared: PreparedProcess | None = None,
        kind: str = "",
    ) -> tuple[EngineProcess, str]:
        """Start an engine on a model folder and wait until it has a port; returns it and its URL.

        ``prepared`` becomes the engine if it still runs. Raises EngineUnreachable, with the tail of its
        log, when it exits or opens no port within the deadline.
        """
        port_file = log.with_suffix(".port")
        port_file.unlink(missing_ok=True)
        words = command(folder, version, port_file)
        if prepared is not None and (process := await prepared.become(words)) is not None:
            engine = cls(process, log, prepared.log_start, kind)
        else:
            process, log_start = await _started(words, asyncio.subprocess.DEVNULL, log, inherited)
            engine = cls(process, log, log_start, kind)
        try:
            port = await engine._read_port(port_file, deadline_s)
        except BaseException:
            await engine.stop()
            raise
        return engine, f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def started(self) -> None:
        """Note the processes of its group, once, when it answers: listing them takes milliseconds."""
        self._members = group_members(self.pid)

    def cpu_seconds(self) -> float:
        return sum(map(process_cpu_seconds, self._members))

    async def wait(self) -> str:
        code = await self._process.wait()
        if not self._group_ended:  # once only: the number may belong to another process by now
            self._group_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        tail = self._tail()
        fault = fault_in(tail) if code != -signal.SIGKILL else None  # which no log explains
        named = "" if fault is None else f": {fault.text(self._kind)}"
        return f"the engine (pid {self.pid}) {how}{named}; end of {self._log}:\n{tail}"

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self.kill()
        await self.wait()

    async def _read_port(self, port_file: Path, deadline_s: float) -> int:
        deadline = time.monotonic() + deadline_s
        while self._process.returncode is None:
            port = _port_in(port_file)
            if port is not None:
                return port
            if time.monotonic() > deadline:
                raise EngineUnreachable(
                    f"the engine (pid {self.pid}) opened no port within {deadline_s:g} s; "
                    f"end of {self._log}:\n{self._tail()}"
                )
            await asyncio.sleep(_POLL_S)
        raise EngineUnreachable(await self.wait())

    def _tail(self) -> str:
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip() or "(empty)"


def _port_in(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def group_members(group: int) -> list[int]:
    members: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just exited
            if int(path.read_text().rpartition(")")[2].split()[2]) == group:
                members.append(int(path.parent.name))
    return members


def process_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
