"""Processes on this machine that belong to a test."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path, *, word: str = "") -> list[int]:
    """Running processes whose command line names the folder, or that write into it, as a prepared engine does."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
            output = str((path.parent / "fd" / "1").readlink())
            state = path.with_name("stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if (
            (str(folder) in command or str(folder) in output)
            and word in command
            and state != "Z"
            and int(path.parent.name) != os.getpid()
        ):
            found.append(int(path.parent.name))
    return found
