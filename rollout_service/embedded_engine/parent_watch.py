"""Exit when the parent process exits, even by SIGKILL: an orphan process would hold its port and memory."""

from __future__ import annotations

import os
import signal
import threading
import time

from penstock.protocol.parent_death import end_with_parent

_POLL_S = 0.5


def exit_with_parent(parent: int | None = None) -> None:
    """Have this process killed with SIGKILL when its parent exits.

    ``parent`` is the parent's process id as the parent itself passed it: if the parent has exited before this call, the
    kernel has given this process another one. None: the present parent.

    The kernel's signal is sent when the *thread* that started this process ends, and exists on Linux only. Polling the
    parent's id covers other systems and the exit of the process.
    """
    parent = os.getppid() if parent is None else parent
    end_with_parent(parent)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
