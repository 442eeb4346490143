"""The peak of GPUs in matrix products of bfloat16 without sparsity, as their vendors' data sheets give it."""

from __future__ import annotations

# Part of the name that CUDA reports -> FLOP/s. A longer part is looked for first: an "H100 PCIe" is not an "H100".
_BFLOAT16 = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "H20": 148e12,
    "H800": 989.4e12,
    "L4": 121e12,
    "L40S": 362e12,
    "L40": 181e12,
    "MI300X": 1307.4e12,
    "RTX 4090": 165.2e12,
}


def peak_of(device: str, dtype: str) -> float | None:
    """Return a device's peak in FLOP/s; None for one that is not in the table, and for another dtype than bfloat16.

    Nothing is assumed for a CPU, whose peak depends on clock, cores and instructions: ``trainer.peak_flops`` sets it.
    """
    if dtype != "bfloat16":
        return None
    words = device.split()
    for part in sorted(_BFLOAT16, key=len, reverse=True):
        if _stands_in(part.split(), words):
            return _BFLOAT16[part]
    return None


def _stands_in(part: list[str], words: list[str]) -> bool:
    """Return True if the words of ``part`` are among those of a name, in order; a word may go on after a hyphen."""
    found = iter(words)
    return all(any(word == one or word.startswith(f"{one}-") for word in found) for one in part)
