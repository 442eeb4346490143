"""The irrevocable restrictions of a program. The order matters: each step needs rights that a later one removes.

1. A session of its own, and no file descriptors except its pipes.
2. Limits: CPU time, address space, files, processes, no core dumps.
3. Another user, when started by root, and no capabilities.
4. Landlock (unless bubblewrap built a file system of its own), then the filter over system calls.

Landlock rules of a program: it may read some folders and write nothing.

Where the kernel supports it, TCP (ABI 4), ioctl on devices (5), abstract sockets and signals (6) are refused too;
the system call filter (`seccomp`) refuses the same on every kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import resource
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.sandbox.inside import seccomp

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # the rights that each ABI can restrict
_LATEST = 5
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS = 1, 4, 8, 38
_CAP_DAC_READ_SEARCH = 2
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_V3 = 0x20080522
_OPEN_FILES = 64


def version(libc: ctypes.CDLL) -> int:
    """Return the kernel's Landlock ABI, 0 if it has none."""
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)))


def ruleset(libc: ctypes.CDLL, readable: Sequence[str], writable: Sequence[str]) -> int:
    """Return a ruleset's descriptor: read beneath ``readable``, write the files ``writable``. Raises OSError."""
    abi = version(libc)
    if abi < 1:
        raise OSError("this kernel has no Landlock; use Linux 5.13 or later with Landlock enabled")
    rights = struct.pack("=QQQ", _FILE_RIGHTS[min(abi, _LATEST)], _TCP * (abi >= 4), _SCOPES * (abi >= 6))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = libc.syscall(_CREATE, rights[:size], ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in readable:
        _allow(libc, rules, path, _READ_FILE)
    for path in writable:
        _allow(libc, rules, path, _READ_FILE | _WRITE_FILE)
    return rules


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights |= _READ_DIR if os.path.isdir(path) else 0  # noqa: PTH112 pathlib costs every start 3 ms
        rule = struct.pack("=Qi", rights, folder)
        if libc.syscall(_ADD, rules, _PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule: {path}")
    finally:
        os.close(folder)


def restrict(libc: ctypes.CDLL, rules: int) -> None:
    """Apply the rules to this process, irrevocably; needs no_new_privs. Raises OSError."""
    if libc.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program; the service enforces those on wall time and output itself."""

    cpu_s: float
    memory_bytes: int
    tasks: int  # threads; there are no other processes


class Confinement:
    def __init__(self, *, readable: Sequence[str], uid: int | None, landlocked: bool) -> None:
        """``uid`` is the user to switch to, None to keep the current one. Raises OSError if the kernel lacks a feature."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._machine = seccomp.machine()
        self._uid = uid
        paths = [path for path in readable if not _is_device(path)]
        devices = [path for path in readable if path == "/dev/null"]
        others = [path for path in readable if _is_device(path) and path not in devices]
        self._rules = ruleset(self._libc, [*paths, *others], devices) if landlocked else -1
        self._unseen = 0 if uid is not None else _unseen_tasks()
        # A folder above the interpreter may be unreadable to other users (/root). Landlock still confines reads.
        self._reads_past_modes = landlocked and not all(_open_to_others(path) for path in paths)

    def enter(self, limits: Limits, pipes: Sequence[int]) -> None:
        """Confine this process to ``pipes``, which become descriptors 0, 1, 2, ...; raises OSError."""
        os.setsid()
        self._keep_only(pipes)
        # the kernel counts tasks per user; a dedicated user has no others
        _limit(limits, others=0 if self._uid is not None else _visible_tasks() + self._unseen)
        if self._uid is not None:
            self._become(self._uid)
        self._prctl(_SET_PDEATHSIG, signal.SIGKILL)
        self._prctl(_SET_DUMPABLE, 0)
        self._prctl(_SET_NO_NEW_PRIVS, 1)
        os.chdir("/")
        if self._rules >= 0:
            restrict(self._libc, self._rules)
            os.close(self._rules)
        seccomp.apply(self._libc, self._machine)

    def _keep_only(self, pipes: Sequence[int]) -> None:
        rules = self._rules
        wanted = [*pipes, rules] if rules >= 0 else list(pipes)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _OPEN_FILES) for fd in wanted]
        for place, fd in enumerate(moved):
            os.dup2(fd, place)
        os.closerange(len(wanted), _highest_descriptor())
        self._rules = len(wanted) - 1 if rules >= 0 else -1

    def _become(self, uid: int) -> None:
        if self._reads_past_modes:
            self._prctl(_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kept = 1 << _CAP_DAC_READ_SEARCH if self._reads_past_modes else 0
        header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
        if self._libc.syscall(_CAPSET[self._machine], header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)):
            raise OSError(ctypes.get_errno(), "capset")

    def _prctl(self, option: int, value: int) -> None:
        if self._libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def _limit(limits: Limits, *, others: int) -> None:
    seconds = max(1, math.ceil(limits.cpu_s))
    hard = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NOFILE: (_OPEN_FILES, _OPEN_FILES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (64, 64),
        resource.RLIMIT_NPROC: (others + limits.tasks, others + limits.tasks),
    }
    for which, (soft, most) in hard.items():
        allowed = resource.getrlimit(which)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, most = min(soft, allowed), min(most, allowed)
        resource.setrlimit(which, (soft, most))


def _unseen_tasks() -> int:
    """Return a lower bound of this user's tasks that /proc does not show, such as those of other containers.

    Found by raising the limit until a fork succeeds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    try:
        for more in (0, 64, 256, 1024, 4096, 16384):
            allowed = _visible_tasks() + more + 1
            if hard != resource.RLIM_INFINITY and allowed > hard:
                break
            resource.setrlimit(resource.RLIMIT_NPROC, (allowed, hard))
            with contextlib.suppress(BlockingIOError):
                if (pid := os.fork()) == 0:
                    os._exit(0)
                os.waitpid(pid, 0)
                return more
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    raise OSError(
        "this user has so many tasks that no limit for a program can be set; run the service as a user of its own"
    )


def _visible_tasks() -> int:
    """Count the threads of this user that /proc shows; 0 if there is no /proc."""
    own, count = os.getuid(), 0
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 no pathlib in here
    except OSError:
        return 0
    for pid in pids:
        try:
            if os.stat(f"/proc/{pid}").st_uid == own:  # noqa: PTH116
                count += len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
        except OSError:
            continue  # it has exited
    return count


def _is_device(path: str) -> bool:
    return path.startswith("/dev/")


def _open_to_others(path: str) -> bool:
    while path != "/":
        path = os.path.dirname(path)  # noqa: PTH120
        if not os.stat(path).st_mode & 0o001:  # noqa: PTH116
            return False
    return True


def _highest_descriptor() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft, 1 << 20)
