"""Have the kernel signal this process when its parent exits; as a program, then become the program on the command line.

Run as ``python -I -S parent_death.py PARENT_PID SIGNAL PORT_FILE PROGRAM [ARGUMENT...]``. When the parent exits for any
reason, SIGKILL included, the kernel sends SIGNAL to the program (``PR_SET_PDEATHSIG``, which survives exec). Every
``{port}`` in the arguments is replaced by the number of a free loopback port, which is also written to PORT_FILE; with
an empty PORT_FILE they stay. A separate program, because code between fork and exec may deadlock in a process with
threads. It imports no package.

The kernel sends the signal when the *thread* that started the process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, death_signal: int = signal.SIGKILL) -> bool:
    """Have the kernel signal this process when its parent exits; return False if the parent has exited already.

    ``parent`` was its process id when this process started. Linux only. Raises OSError for an invalid signal.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        return os.getppid() == parent
    if prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent  # it may have exited before the kernel was asked


def command_words(parent: int, death_signal: int = signal.SIGKILL, *, port_file: Path | str = "") -> list[str]:
    return [sys.executable, "-I", "-S", __file__, str(parent), str(int(death_signal)), str(port_file)]


def main() -> None:
    parent, death_signal, port_file, *command = sys.argv[1:]
    if not end_with_parent(int(parent), int(death_signal)):
        sys.exit(0)
    arguments = _with_port(command, port_file) if port_file else command
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  replacing this process is the purpose
    except OSError as err:
        sys.exit(f"cannot start {arguments[0]}: {err.strerror}")


def _with_port(command: list[str], port_file: str) -> list[str]:
    import socket  # noqa: PLC0415  most programs get no port

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    partial = f"{port_file}.partial"
    with open(partial, "w") as file:  # noqa: PTH123  this program imports as little as it can
        file.write(port)
    os.replace(partial, port_file)  # noqa: PTH105  same
    return [argument.replace("{port}", port) for argument in command]


if __name__ == "__main__":
    main()
