"""The ways to compute attention over packed rows, and which one a run is expected to use; pure, imports no torch."""

from __future__ import annotations

from typing import Literal

Attention = Literal["auto", "flash-3", "flash-4", "flash", "cpu-flash", "flex", "sdpa", "dense"]

MAX_FLASH_HEAD = 256  # dimensions of a head, of torch's flash kernels for CUDA
MAX_MATRIX_BYTES = 256 * 1024 * 1024  # of a float32 matrix [H, T, T]; a larger one only where its name is set

_WHERE = {"flash-3": "cuda", "flash-4": "cuda", "flash": "cuda", "flex": "cuda", "cpu-flash": "cpu"}  # others: anywhere


def expected_backend(chosen: Attention, *, device: Literal["cuda", "cpu"], dtype: str, head_size: int) -> str | None:
    """Return the backend that a run will use on a device with torch alone; None: the chosen one cannot run there.

    A GPU with FlashAttention 3 or 4 installed uses that in the place of ``flash``, which needs the same memory.
    """
    fits_flash = dtype in ("bfloat16", "float16") and head_size <= MAX_FLASH_HEAD
    if chosen != "auto":
        fits = _WHERE.get(chosen, device) == device and (fits_flash or not chosen.startswith("flash"))
        return chosen if fits else None
    if device == "cpu":
        return "cpu-flash"
    return "flash" if fits_flash else "sdpa"


def matrix_bytes(num_heads: int, num_tokens: int) -> int:
    return 4 * num_heads * num_tokens * num_tokens
