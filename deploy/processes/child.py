"""One child process: it is signalled when this one exits, has a separate session and writes to a log file."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.protocol import parent_death
from penstock.protocol.errors import PenstockError
from penstock.protocol.hardware_errors import KILLED, HardwareFault, fault_in

# The kernel sends the parent-death signal when the *thread* that forked exits. So all children are
# started by this one thread, which runs until the process exits.
_starter = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
_started: set[int] = set()  # process ids of all children; touched by that thread alone

_PR_SET_CHILD_SUBREAPER = 36
_FULL_BYTES = 4 * 1024**2  # below this, services cannot write their logs, checkpoints or objects
_REASON_CHARS = 300
_EMPTY_LOG = "its log is empty"


class DeployError(PenstockError):
    """A process could not be started or kept running; the text holds the last lines of its log."""


class Child:
    """A process that can be started, killed and restarted; its log file is appended to."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str] | None = None,
        death_signal: int = signal.SIGKILL,
        keep_open: Sequence[int] = (),
        inherit_output: bool = False,
        waits: bool = False,
    ) -> None:
        """Describe the child.

        ``environ`` is its whole environment (None: the environment of this process), ``death_signal`` the
        signal it gets when this process exits, ``keep_open`` the file descriptors that it inherits. With
        ``inherit_output`` it writes to the output of this process instead of the log. One that ``waits`` reads a line
        from stdin before it begins, see `begin`.
        """
        self.name = name
        self.command = list(command)
        self.log = log
        self._environ = None if environ is None else dict(environ)
        self._death_signal = death_signal
        self._keep_open = tuple(keep_open)
        self._inherits_output = inherit_output
        self._waits = waits
        self._process: subprocess.Popen[bytes] | None = None
        self._group_may_run = False
        self._oom_kills = 0  # before the last process
        self._log_start = 0  # bytes of the log before the last process wrote to it

    def start(self) -> None:
        """Start the process; raises DeployError when its program does not exist."""
        if self.alive:
            raise DeployError(f"{self.name} is already running (pid {self.pid})")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._oom_kills = _oom_kills()
        self._process = _starter.submit(self._popen).result()
        self._group_may_run = True

    def begin(self) -> bool:
        """Let a process that waits go on; returns False if it has exited instead."""
        if not self.alive or self._process is None or self._process.stdin is None:
            return False
        try:
            with self._process.stdin as stdin:
                stdin.write(b"\n")
        except OSError:
            return False
        return True

    def relaunch(self) -> Child:
        """Start the process again after it exited; returns itself, since a supervisor expects the new process."""
        self.start()
        return self

    def _popen(self) -> subprocess.Popen[bytes]:
        bound = parent_death.command_words(os.getpid(), self._death_signal)
        with contextlib.nullcontext() if self._inherits_output else self.log.open("ab") as out:
            self._log_start = 0 if out is None else out.tell()
            process = subprocess.Popen(
                [*bound, *self.command],
                stdin=subprocess.PIPE if self._waits else subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                env=self._environ,
                pass_fds=self._keep_open,
                start_new_session=True,  # Ctrl-C reaches only the parent, and one signal stops the whole group
            )
        _started.add(process.pid)
        return process

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.poll() if self._process else None

    def wait(self, deadline_s: float) -> int:
        """Wait until the process exits and return the exit code; raises DeployError after ``deadline_s``."""
        if self._process is None:
            raise DeployError(f"{self.name} was never started")
        try:
            code = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise DeployError(f"{self.name} (pid {self.pid}) did not exit within {deadline_s:.0f} s") from None
        self.reap_group()
        return code

    def crash(self) -> None:
        """SIGKILL the process and whatever it started, and return at once."""
        if self._process is not None and self._process.poll() is None:
            self._signal_group(signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL the process and whatever it started; returns when it has exited."""
        if self._process is not None:
            self.crash()
            self._process.wait()
            self.reap_group()

    def stop(self, grace_s: float = 10.0) -> None:
        """Send SIGTERM, then SIGKILL after ``grace_s``; no process of its group is left."""
        self.ask_to_stop()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
            self.kill()

    def ask_to_stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def reap_group(self) -> None:
        """Kill the rest of the group of a process that exited, and reap what this process adopted of it (subreaper)."""
        if not self._group_may_run:  # once only: the kernel may have reused the group id
            return
        self._group_may_run = False
        self._signal_group(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_PGID, self.pid, os.WEXITED) is not None:
                pass

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def fault(self) -> HardwareFault | None:
        """Return the error of hardware or memory that ended the process, by its log or the kernel's count; None for any other end."""
        code = self.returncode
        if code == -signal.SIGKILL:
            return HardwareFault(KILLED) if _oom_kills() > self._oom_kills else None
        return fault_in(self._log_end()) if code and not self._inherits_output else None

    @property
    def may_continue(self) -> bool:
        """Whether the same command may succeed: it was killed by a signal, or ended by an error that can be transient."""
        code = self.returncode
        return code is not None and (code < 0 or ((fault := self.fault()) is not None and fault.is_transient))

    def _log_end(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - 16_384))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def log_tail(self, num_lines: int = 15) -> str:
        lines = self._log_end().splitlines()[-num_lines:]
        return "\n".join(f"    {line}" for line in lines) or f"    ({_EMPTY_LOG})"

    def reason(self) -> str:
        """Return why the process exited: the last line of its log that is not a JSON line, and whether the disk is full.

        Empty after a signal, which no log explains, unless memory ran out or the disk is full.
        """
        code, fault = self.returncode, self.fault()
        line = "" if code is None or code <= 0 else _last_plain_line(self.log_tail().splitlines())
        if fault is not None and not any(map(str.isalpha, line)):  # after torchrun's last line, or a signal
            line = fault.happened
        return "; ".join(part for part in (line, full_disk(self.log.parent)) if part)

    def failure(self, what: str) -> DeployError:
        code = self.returncode
        end = "is still running" if code is None else f"ended with {describe_exit(code)}"
        full = full_disk(self.log.parent)
        return DeployError(
            f"{self.name} {what}; it {end}. {full + '. ' if full else ''}Last lines of {self.log}:\n{self.log_tail()}"
        )


def _oom_kills() -> int:
    """Return how many processes the kernel of this machine has killed because memory ran out; 0 where it does not count."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", "0"))
    return 0


def full_disk(folder: Path) -> str:
    """Return a sentence if the file system of a folder is full, when nothing can be written to the logs either; else ""."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"the disk of {folder} is full ({free / 1e6:.1f} MB free): free disk space" if free < _FULL_BYTES else ""


def _last_plain_line(lines: Sequence[str]) -> str:
    plain = [line.strip() for line in lines if line.strip() and not line.strip().startswith(("{", f"({_EMPTY_LOG}"))]
    return plain[-1][:_REASON_CHARS] if plain else ""


def adopt_orphans() -> None:
    """Become the parent of the orphans of child processes, instead of process 1, until `release_orphans`."""
    _be_subreaper(1)


def release_orphans() -> None:
    _be_subreaper(0)


def _be_subreaper(yes: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, yes, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_orphans() -> int:
    """Kill and reap adopted processes, so that they stop and their CPU time is counted.

    An orphan is a child of this process that no `Child` started, in another session: what other code
    of this process starts shares its session and is not touched. Returns how many there were.
    """
    return _starter.submit(_end_orphans).result()


def _end_orphans() -> int:
    ended = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ChildProcessError):
            pid = int(path.parent.name)
            fields = path.read_text().rsplit(")", 1)[1].split()  # state, parent, group, session, ...
            if int(fields[1]) == os.getpid() and int(fields[3]) != os.getsid(0) and pid not in _started:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended += 1
    return ended


def exit_status(code: int) -> int:
    """Return the exit code of a process as a shell reports it: 128 and the number of the signal that killed it."""
    return code if code >= 0 else 128 - code


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def wait_until(condition: Callable[[], object], deadline_s: float | None, period_s: float = 0.01) -> bool:
    """Poll ``condition``; return True once it holds, False after ``deadline_s`` (None: wait for ever)."""
    deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
    while not condition():
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            return False
        time.sleep(min(period_s, left_s))
    return True
