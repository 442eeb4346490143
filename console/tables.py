"""The console that tables are printed to: as wide as the terminal, or as wide as needed where there is none."""

from __future__ import annotations

import sys

from rich.console import Console

_UNBOUNDED = 100_000  # columns


def console() -> Console:
    """Return a console for stdout; in a pipe or a file no cell is cut off."""
    return Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)
