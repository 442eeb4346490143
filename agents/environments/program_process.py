"""Run one program of an episode in a process group of its own, and end all of the group; find those of workers that are gone.

The kernel kills the program when its worker dies (`protocol/parent_death.py`). What the program itself had started then, or what had
left its process group, carries the worker's mark in its environment variables, as the folders do in their names: every worker with
programs on the machine looks for those of workers that are gone, when it begins and every half minute, and ends and deletes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.protocol import parent_death

log = structlog.get_logger("rollout.program")

SWEEP_S = 30.0
MARK = "PENSTOCK_PROGRAM_OF"  # the variable that names the worker of a program
PREFIX = "penstock-program-"  # of the folders of episodes; the worker's mark follows
_ALWAYS_PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ")
_KEPT_BYTES = 4096  # the end of what a program prints
_READ_BYTES = 65_536
_LAST_READS = 16  # at the end: 1 MiB, the most that a pipe holds; a process that left the group may write without end
_REAP_S = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    status: int | None  # its exit status, negative: the signal that killed it; None: it ran into its deadline
    output: str  # the end of what it printed


async def run(command: Sequence[str], folder: Path, variables: Mapping[str, str], deadline_s: float) -> Ended:
    """Run a command to its end, or for ``deadline_s``; kill what is left of its process group, whatever happens."""
    words = [*parent_death.command_words(os.getpid()), *command]
    output = Output()
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.write_end,
            stderr=output.write_end,
            cwd=folder,
            env=dict(variables),
            start_new_session=True,
        )
        try:
            status = await _status(process, deadline_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_S):
                    await process.wait()
    except OSError as err:
        return Ended(127, f"cannot start it in {folder}: {err}")
    finally:
        output.close()
    return Ended(status, output.text())


async def _status(process: asyncio.subprocess.Process, deadline_s: float) -> int | None:
    try:
        async with asyncio.timeout(deadline_s):
            return await process.wait()
    except TimeoutError:
        return None


class Output:
    """A pipe whose last bytes are kept; the program is never stopped by a full one."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = b""
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def close(self) -> None:
        """Read what is left, and give the pipe up."""
        os.close(self.write_end)
        for _ in range(_LAST_READS):
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)

    def text(self) -> str:
        """Return the end of the output."""
        return self._kept.decode("utf-8", "replace").strip()

    def _read(self) -> bool:
        try:
            new = os.read(self._read_end, _READ_BYTES)
        except BlockingIOError:
            return False
        self._kept = (self._kept + new)[-_KEPT_BYTES:]
        return bool(new)


def passed(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of this process that a program gets: those it needs to run, and ``names``. Others hold logins."""
    return {name: os.environ[name] for name in (*_ALWAYS_PASSED, *names) if name in os.environ}


def mark() -> str:
    """Return this worker's mark: its PID namespace, PID and start time."""
    return f"{_namespace()}.{os.getpid()}.{_start_time(os.getpid())}"


def sweep(parent: Path) -> tuple[int, int]:
    """Kill programs and delete folders in ``parent`` of workers of this PID namespace that are gone; return how many."""
    killed = deleted = 0
    for pid in left_processes():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    for folder in left_folders(parent):
        shutil.rmtree(folder, ignore_errors=True)
        deleted += 1
    return killed, deleted


def left_processes() -> list[int]:
    """Return the programs of workers of this PID namespace that are gone, and what these have started."""
    found = (int(one.name) for one in Path("/proc").glob("[0-9]*") if _is_left(_mark_of(one)))
    return [pid for pid in found if pid != os.getpid()]


def left_folders(parent: Path) -> list[Path]:
    """Return the folders in ``parent`` of such programs, as far as they are this user's."""
    found = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another worker deletes it too
            if _is_left(folder.name.removeprefix(PREFIX).rpartition("-")[0]) and folder.lstat().st_uid == os.getuid():
                found.append(folder)
    return found


class Sweeper:
    """Sweeps a folder at once and then every ``period_s``, in a thread, until `close`."""

    def __init__(self, parent: Path, period_s: float = SWEEP_S) -> None:
        """Start the thread."""
        self._parent, self._period_s = parent, period_s
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="sweep-programs", daemon=True).start()

    def close(self) -> None:
        """End it, after the sweep under way."""
        self._closed.set()

    def _run(self) -> None:
        while True:
            killed, deleted = sweep(self._parent)
            if killed or deleted:
                log.warning("programs of a worker that is gone", processes_killed=killed, folders_deleted=deleted)
            if self._closed.wait(self._period_s):
                return


def _mark_of(process: Path) -> str:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has ended
        return ""
    start = f"{MARK}=".encode()
    return next((one.removeprefix(start).decode("ascii", "replace") for one in variables if one.startswith(start)), "")


def _is_left(found: str) -> bool:
    """Return True for a mark of this PID namespace whose worker does not run any more."""
    namespace, _, worker = found.partition(".")
    pid, _, start = worker.partition(".")
    return namespace == _namespace() and pid.isdecimal() and start.isdecimal() and _start_time(int(pid)) != start


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink()).removeprefix("pid:[").removesuffix("]")


def _start_time(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; empty: there is none. Field 22 of proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
