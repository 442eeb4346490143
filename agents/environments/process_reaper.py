"""Run a program in a session of its own, and end all its descendants when it ends: daemons, nohup, setsid, double forks.

Run as ``python -I -S process_reaper.py PROTOCOL_FOLDER PARENT_PID DEADLINE_S PROGRAM [ARGUMENT...]``; ends as the program ends. Orphans of
the program become children of this process (``PR_SET_CHILD_SUBREAPER``), so that none is lost. SIGTERM, SIGINT, SIGHUP (except under nohup), the
end of the parent or the deadline (for a parent that is stopped) end the program first. Imports only the standard library and `protocol/parent_death.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 8.0  # a process in an uninterruptible system call ends later
_LONGEST_S = 1e9
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)


class Stopped(BaseException):
    pass


def main() -> None:
    folder, parent, deadline_s, *command = sys.argv[1:]
    sys.path.append(folder)
    from parent_death import end_with_parent  # pyright: ignore[reportMissingImports]  # noqa: PLC0415

    for number in _STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    signal.setitimer(signal.ITIMER_REAL, min(float(deadline_s), _LONGEST_S))
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not end_with_parent(int(parent), signal.SIGTERM):
        sys.exit(0)
    status = -signal.SIGTERM
    own = os.getpid()
    with contextlib.suppress(Stopped):
        program = os.fork()
        if not program:
            _become(command, lambda: end_with_parent(own))
        status = _wait_for(program)
    _ignore_stops()
    end_descendants()
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(own, -status)


def _stop(*_: object) -> None:
    _ignore_stops()
    raise Stopped


def _ignore_stops() -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


def _become(command: list[str], bind: Callable[[], bool]) -> NoReturn:
    os.setsid()
    try:
        if bind():
            os.execvp(command[0], command)  # noqa: S606  replacing this process is the purpose
    except OSError as err:
        os.write(2, f"cannot start {command[0]}: {err.strerror}\n".encode())
    os._exit(1)


def _wait_for(program: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return os.waitstatus_to_exitcode(status)


def end_descendants() -> None:
    ends_at = time.monotonic() + _KILL_S
    while time.monotonic() < ends_at:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208  no pathlib here
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123  same
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found[1:]


if __name__ == "__main__":
    main()
