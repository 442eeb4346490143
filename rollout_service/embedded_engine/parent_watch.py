"""Ends this process when the one that started it ends, even by SIGKILL: an orphan would hold its port and memory."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL at the parent's death, and watch for it as well.

    ``parent`` is its process id, known to whoever started us: a parent that ended before we got
    here has been replaced by another, which we would watch in vain. None: whoever it is now.

    The kernel's signal follows the *thread* that started us, and is not there at all outside Linux; watching
    the parent's id costs nothing and covers both.
    """
    parent = os.getppid() if parent is None else parent
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass  # not Linux: the watching thread does it alone
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
