"""Seeds that follow from ``run.seed``: one of its own for everything that draws random numbers."""

from __future__ import annotations

import hashlib

MAX_SEED = 2**63 - 1  # what engines take


def derived_seed(seed: int, *what: str | int) -> int:
    """Return the seed of something named by ``what``, 63 bits: another one for each name, the same in every process."""
    text = "\0".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
