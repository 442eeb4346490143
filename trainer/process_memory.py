"""The memory of a trainer's process: no collections while it starts, no growth by freed blocks or compiled products."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import MutableMapping


def configure_torch(environ: MutableMapping[str, str]) -> None:
    """Set what torch reads when it is imported, unless it is set otherwise.

    - Pages of 2 MiB for tensors of that size and more. The buffers of an optimizer step are allocated and freed in each
      one; page by page of 4 KiB the kernel took two thirds of the CPU time of AdamW on 30 million parameters (0.18 s
      instead of 0.07 s a step).
    - A GPU's memory in segments that grow: packed rows have another length in each micro-batch, and blocks of fixed
      segments, which no later tensor fits, would stay reserved.
    - The code of the last 64 products of bfloat16 matrices that a CPU computes. oneDNN compiles 0.6 MB of code for each
      shape, and two caches keep 1,024 each: oneDNN's and torch's. Rows of other lengths, and other numbers of tokens of
      an expert, are other shapes, so that a training grew by 0.6 GB. A dense model uses the same 20 in each pass.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the former name, which torch still reads
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    environ.setdefault("LRU_CACHE_CAPACITY", "64")


def end_start() -> None:
    """Exempt what has been imported and built from garbage collections, and allow them again if the start did not.

    While half a million objects are imported, collections find nothing and take a fifth of the CPU time; later, a full
    collection need not scan them.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def return_freed_memory() -> bool:
    """Return freed memory to the kernel; returns False where the C library cannot.

    Blocks of a step's tensors and packs, freed by a dozen threads, leave holes in glibc's heaps that it does not return
    by itself: a trainer whose objects stay the same grows by 10 kB a step.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)
    return True
