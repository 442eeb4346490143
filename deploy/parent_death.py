"""Ties this process to its parent's life, then becomes the program named on the command line.

Run as ``python -I -S bound.py PARENT_PID SIGNAL PROGRAM [ARGUMENT...]``. When the parent ends, by
whatever means, SIGKILL included, the kernel sends SIGNAL to the program. A program of its own,
because code that runs between fork and exec in a process with threads may deadlock; the setting
survives exec.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal, make sure the parent is still there, and exec."""
    parent, death_signal, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # it ended before the kernel knew our wish
        sys.exit(0)
    os.execvp(command[0], command)  # noqa: S606 - becoming the program is the purpose


if __name__ == "__main__":
    main()
