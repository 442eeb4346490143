"""`python -m penstock.trainer.commands.algorithm_reference [--check] [PAGE]`: the tables of docs/algorithms.md.

Writes the tables of all built-in losses, estimators, filters, corrections and their options between the markers of the
page; with ``--check`` writes nothing and exits with 1 when the page is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.trainer.commands.algorithm_tables import with_reference

PAGE = Path("docs/algorithms.md")


def main(arguments: Sequence[str]) -> int:
    """Renew or check the page; returns the exit code."""
    names = [argument for argument in arguments if argument != "--check"]
    page = Path(names[0]) if names else PAGE
    old = page.read_text()
    new = with_reference(old)
    if "--check" not in arguments:
        page.write_text(new)
        return 0
    missing = [line for line in new.splitlines() if line not in old.splitlines()]
    if new != old:
        command = "python -m penstock.trainer.commands.algorithm_reference"
        sys.stderr.write("\n".join([f"{page} is not up to date; run {command}", *missing]) + "\n")
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
