"""What the service does about its memory: threads share one heap of the C library."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # of malloc.h


def use_one_heap() -> bool:
    """Let all threads allocate from one heap; returns False where the C library has no such option.

    Packs are read and scored in a pool of threads. With a heap for each, what one thread frees stays in its heap while
    another asks the kernel for more: the process grew by 270 bytes a pack between the 8,000th and the 15,000th, with one heap by
    5. The interpreter's lock lets one thread allocate at a time, so threads hardly wait for the heap.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return mallopt(_M_ARENA_MAX, 1) == 1
