"""Ties a program to the life of the worker that starts it, gives it a port, and becomes it.

Run as ``python -I -S tether.py PARENT_PID PORT_FILE PROGRAM [ARGUMENT...]``. Every ``{port}`` in the arguments
becomes the number of a port of the loopback that is free now, which is also written to PORT_FILE. When the worker
ends, SIGKILL included, the kernel kills the program. A program of its own, because code between fork and exec may
deadlock in a process with threads; the setting survives exec.
"""

import ctypes
import os
import pathlib
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal, make sure the worker is still there, choose the port, and exec."""
    parent, port_file, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the kernel knew our wish
        sys.exit(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = [argument.replace("{port}", port) for argument in command]
    partial = pathlib.Path(f"{port_file}.partial")
    partial.write_text(port)
    partial.rename(port_file)
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  becoming the program is the purpose
    except OSError as err:
        sys.exit(f"cannot start {arguments[0]}: {err.strerror}")


if __name__ == "__main__":
    main()
