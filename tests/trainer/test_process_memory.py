"""The trainer's process: garbage collections after the start, and freed memory."""

from __future__ import annotations

import ctypes
import gc

import psutil
import pytest

from penstock.trainer import process_memory


def test_collections_begin_again_when_the_start_has_ended() -> None:
    """What was built meanwhile is not collected again; where nothing disabled them, nothing changes."""
    frozen = gc.get_freeze_count()
    process_memory.end_start()
    assert gc.get_freeze_count() <= frozen
    gc.disable()
    try:
        process_memory.end_start()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.enable()


def test_freed_blocks_between_used_ones_are_returned_to_the_kernel() -> None:
    """Of many small blocks all but a few are freed: the pages between these go back."""
    if not process_memory.return_freed_memory():
        pytest.skip("the C library cannot return memory")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(16_000) for _ in range(4000)]
    for block in blocks:
        ctypes.memset(block, 1, 16_000)
    for block in blocks[:-1]:
        libc.free(block)  # the last one keeps the heap's end where it is
    resident = psutil.Process().memory_info().rss
    process_memory.return_freed_memory()
    assert resident - psutil.Process().memory_info().rss > 30_000_000
    libc.free(blocks[-1])
