"""Have the kernel signal this process when its parent exits, then become the program on the command line.

Run as ``python -I -S parent_death.py PARENT_PID SIGNAL PROGRAM [ARGUMENT...]``. When the parent exits for any
reason, SIGKILL included, the kernel sends SIGNAL to the program. A program of its own,
because code that runs between fork and exec in a process with threads may deadlock; the setting
survives exec.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the signal, check that the parent still runs, and exec."""
    parent, death_signal, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # the parent exited before the signal was set
        sys.exit(0)
    os.execvp(command[0], command)  # noqa: S606 - becoming the program is the purpose


if __name__ == "__main__":
    main()
