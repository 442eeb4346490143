"""Run one program of an episode, confine it with bubblewrap, and end all that it started.

The program runs under `process_reaper.py`, which ends with the program, at its deadline and with its worker, and ends every process that
the program left first. What escapes that (the reaper was killed) carries the episode's mark in its environment variables: it is killed when
the episode ends, and by any worker with programs on the machine, when that begins and every half minute, once the mark's worker has exited.
Folders of episodes have the worker's mark in their names, and are deleted likewise.

A confined program has separate namespaces for processes, network and users. The only network is a loopback interface on which
`inside_sandbox.py` listens and passes every connection on to the proxy's Unix socket. All of its processes end with the sandbox: none
can leave it, whatever it starts. Memory and CPU time are not limited: use a command that does (`systemd-run`, a container) for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.agents.environments import inside_sandbox, process_reaper
from penstock.protocol import parent_death
from penstock.protocol.errors import ConfigError

log = structlog.get_logger("rollout.program")

SWEEP_S = 30.0
MARK = "PENSTOCK_PROGRAM_OF"  # the variable that names worker and episode of a program
PREFIX = "penstock-program-"  # of the folders of episodes; the worker's mark follows
_ALWAYS_PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ")
_KEPT_BYTES = 4096  # the end of what a program prints
_READ_BYTES = 65_536
_LAST_READS = 16  # at the end: 1 MiB, the most that a pipe holds; a process that left the group may write without end
_REAP_S = 10.0
_MOST_SCANS, _SCAN_S = 100, 0.01  # a process that forks all the time is found again
_REAPER_GRACE_S = 5.0  # behind the deadline, which the worker ends the program at unless it is stopped
PROXY_PORT = 61080  # inside; no program's usual port, and none that the kernel chooses
_SOCKET = "/run/penstock-proxy"  # inside
_NOBODY = "65534"
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ssl", "/etc/localtime",
    "/etc/alternatives",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ended:
    status: int | None  # its exit status, negative: the signal that killed it; None: it ran into its deadline
    output: str  # the end of what it printed


async def run(command: Sequence[str], folder: Path, variables: Mapping[str, str], deadline_s: float) -> Ended:
    """Run a command to its end, or for ``deadline_s``; kill all that it started and that has its mark, whatever happens."""
    own = [str(Path(parent_death.__file__).parent), str(os.getpid())]
    reaper = [sys.executable, "-I", "-S", process_reaper.__file__, *own]
    output = Output()
    try:
        process = await asyncio.create_subprocess_exec(
            *reaper, str(deadline_s + _REAPER_GRACE_S), *command, stdin=asyncio.subprocess.DEVNULL,
            stdout=output.write_end, stderr=output.write_end, cwd=folder, env=dict(variables), start_new_session=True,
        )  # fmt: skip
        try:
            status = await _status(process, deadline_s)
        finally:
            await _end(process, variables.get(MARK, ""))
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


async def _end(process: asyncio.subprocess.Process, mark_of_episode: str) -> None:
    """Have the reaper end the program and all that it started; then kill whatever is left."""
    try:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_S):
                    await process.wait()
    finally:
        has_reaped = process.returncode is not None and process.returncode >= 0  # else look through all processes
        await kill_group(process, "" if has_reaped else mark_of_episode)


async def kill_group(process: asyncio.subprocess.Process, mark_of_episode: str = "") -> None:
    """Kill a process, its group, and the processes that carry a mark."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if mark_of_episode:
        await asyncio.to_thread(_kill, lambda found: found == mark_of_episode)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REAP_S):
            await process.wait()


class Output:
    """A pipe whose last bytes are kept; the program is never stopped by a full one."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = b""
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def close(self) -> None:
        os.close(self.write_end)
        for _ in range(_LAST_READS):
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)

    def text(self) -> str:
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


def episode_mark() -> str:
    return f"{mark()}.{secrets.token_hex(8)}"


def sweep(parent: Path) -> tuple[int, int]:
    """Kill programs and delete folders in ``parent`` of workers of this PID namespace that have exited; return how many."""
    killed, folders = _kill(_is_left), left_folders(parent)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if killed or folders:
        log.warning("ended programs of a worker that has exited", processes_killed=killed, folders_deleted=len(folders))
    return killed, len(folders)


def _kill(applies: Callable[[str], bool]) -> int:
    """Kill the processes with such a mark, and those that they start meanwhile; return how many."""
    killed = 0
    for _ in range(_MOST_SCANS):
        pids = left_processes(applies)
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(_SCAN_S)
    return killed


def left_processes(applies: Callable[[str], bool] | None = None) -> list[int]:
    pids = (int(one.name) for one in Path("/proc").glob("[0-9]*") if (applies or _is_left)(_mark_of(one)))
    return [pid for pid in pids if pid != os.getpid()]


def left_folders(parent: Path) -> list[Path]:
    folders = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another worker deletes it too
            if _is_left(folder.name.removeprefix(PREFIX).rpartition("-")[0]) and folder.lstat().st_uid == os.getuid():
                folders.append(folder)
    return folders


class Sweeper:
    def __init__(self, parent: Path, period_s: float = SWEEP_S) -> None:
        self._parent, self._period_s = parent, period_s
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="sweep-programs", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while True:
            sweep(self._parent)
            if self._closed.wait(self._period_s):
                return


def _mark_of(process: Path) -> str:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has ended
        return ""
    start = f"{MARK}=".encode()
    marks = (variable.removeprefix(start) for variable in variables if variable.startswith(start))
    return next(marks, b"").decode("ascii", "replace")


def _is_left(process_mark: str) -> bool:
    namespace, _, worker = process_mark.partition(".")
    pid, start, *_ = [*worker.split("."), ""]
    return namespace == _namespace() and pid.isdecimal() and start.isdecimal() and _start_time(int(pid)) != start


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink()).removeprefix("pid:[").removesuffix("]")


def _start_time(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; empty: there is none. Field 22 of proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def bubblewrap() -> str:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError(
            "options.sandbox needs bubblewrap: apt install bubblewrap, or leave it out and name a command that confines the program"
        )
    return bwrap


def confined(
    command: Sequence[str], *, start_in: Path, readable: Sequence[str], writable: Path, socket: Path
) -> list[str]:
    """Return the command that runs ``command`` confined.

    ``start_in`` and ``readable`` can be read besides the system and this Python, ``writable`` is the episode's folder, ``socket`` the
    proxy's. The sandbox sees the variables that the command is started with: in its arguments every user could read them.
    """
    arguments = [bubblewrap(), "--unshare-all", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    arguments += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    arguments += ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"]  # noqa: S108  inside
    for path in dict.fromkeys(_readable(start_in, readable)):
        arguments += (
            ["--symlink", str(Path(path).readlink()), path] if Path(path).is_symlink() else ["--ro-bind", path, path]
        )
    arguments += ["--bind", str(writable), str(writable), "--ro-bind", str(socket), _SOCKET]
    arguments += ["--ro-bind", inside_sandbox.__file__, "/run/inside_sandbox.py", "--remount-ro", "/"]
    arguments += ["--chdir", str(start_in.absolute()), "--"]
    return [*arguments, sys.executable, "-I", "-S", "/run/inside_sandbox.py", _SOCKET, str(PROXY_PORT), *command]


def _readable(start_in: Path, readable: Sequence[str]) -> Iterator[str]:
    yield from (path for path in SYSTEM if Path(path).exists())
    for path in (sys.base_prefix, sys.prefix, str(start_in.absolute()), *readable):
        if Path(path).is_symlink():  # the link alone would lead nowhere inside
            yield str(Path(path).resolve())
        if Path(path).exists():
            yield path
