"""Exec a program that the kernel kills when its parent process exits, with a free port in its arguments.

Run as ``python -I -S parent_death.py PARENT_PID PORT_FILE PROGRAM [ARGUMENT...]``. Every ``{port}`` in the arguments is
replaced by the number of a free loopback port, which is also written to PORT_FILE; with an empty PORT_FILE they stay. When the worker exits or is killed,
the kernel sends the program SIGKILL (``PR_SET_PDEATHSIG``, which survives exec). A program of its own, because code
between fork and exec may deadlock in a process with threads.
"""

import ctypes
import os
import pathlib
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal, check that the worker still runs, choose the port, and exec."""
    parent, port_file, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # it exited before the signal was set
        sys.exit(0)
    arguments = with_port(command, port_file) if port_file else command
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  replacing this process is the purpose
    except OSError as err:
        sys.exit(f"cannot start {arguments[0]}: {err.strerror}")


def with_port(command: list[str], port_file: str) -> list[str]:
    """Return the command with a free port, which is written to a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    partial = pathlib.Path(f"{port_file}.partial")
    partial.write_text(port)
    partial.rename(port_file)
    return [argument.replace("{port}", port) for argument in command]


if __name__ == "__main__":
    main()
