"""What the engine sets for its process before torch is imported: it exits with its parent, and keeps freed memory."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

from penstock.protocol.parent_death import end_with_parent

_POLL_S = 0.5
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_HEAP_BLOCK_BYTES = 32 * 2**20  # glibc's upper limit for the threshold
_KEPT_BYTES = 256 * 2**20


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


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds; return False, changing nothing, where the C library has none."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _LARGEST_HEAP_BLOCK_BYTES),
    )
    return all(mallopt(option, value) == 1 for option, value in wanted)
