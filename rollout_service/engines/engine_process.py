"""An engine as a child process: its command, its life, its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineUnreachable
from penstock.rollout_service.settings import WorkerSettings

LaunchCommand = Callable[[Path, PolicyVersion, Path], list[str]]  # model folder, version, port file → command

_POLL_S = 0.02
_STOP_S = 5.0
_TAIL_BYTES = 4000


def embedded_command(settings: WorkerSettings) -> LaunchCommand:
    """Return how the embedded engine is started."""

    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "penstock.rollout_service.embedded_engine"),
            *("--model-path", str(folder)),
            *("--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)),
            *("--max-running", str(settings.max_running)),
            *("--device", settings.device, "--dtype", settings.dtype),
            *("--weight-version", str(version)),
            *("--die-with-parent", "--parent-pid", str(os.getpid())),
        ]

    return command


class EngineProcess:
    """One life of an engine. The child leads a process group of its own, which ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_start: int) -> None:
        """Use `EngineProcess.start` instead."""
        self._process = process
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
        environ: Mapping[str, str] | None = None,
    ) -> tuple[EngineProcess, str]:
        """Start an engine on a model folder and wait until it has a port; returns it and its URL.

        ``environ`` is its whole environment (None: as ours). Raises EngineUnreachable, with the tail of its
        log, when it ends or stays silent.
        """
        port_file = log.with_suffix(".port")
        port_file.unlink(missing_ok=True)
        with log.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *command(folder, version, port_file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,  # Ctrl-C is ours: we end it after what is in flight
            )
        engine = cls(process, log, log_start)
        try:
            port = await engine._read_port(port_file, deadline_s)
        except BaseException:
            await engine.stop()
            raise
        return engine, f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def started(self) -> None:
        """Note which processes it consists of, now that it answers: looking through all of them takes milliseconds."""
        self._members = group_members(self.pid)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of its living processes and their ended children."""
        return sum(map(process_cpu_seconds, self._members))

    async def wait(self) -> str:
        """Wait until the process has ended; returns how, with the tail of its log. Its group ends with it."""
        code = await self._process.wait()
        if not self._group_ended:  # once only: the number may belong to somebody else by now
            self._group_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the engine (pid {self.pid}) {how}; end of {self._log}:\n{self._tail()}"

    def kill(self) -> None:
        """SIGKILL the process group; `wait` then returns."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process in an orderly way, or kill it when it takes too long; idempotent."""
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
    """Return the process ids of a process group."""
    members: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[2]) == group:
                members.append(int(path.parent.name))
    return members


def process_cpu_seconds(pid: int) -> float:
    """Return user and system seconds of a living process and its ended children; 0.0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
