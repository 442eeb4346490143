"""Read a file of a run's folder, which may be a copy from somebody else: never through a link, never a pipe or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 4 * 1024**3


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the first ``most`` bytes of a regular file.

    Raises OSError for a link, which could lead to any file of this machine, and for what is no regular file: a pipe would
    be waited for without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file; remove it")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def links_below(folder: Path) -> list[Path]:
    """Return every symbolic link below a folder, and every file there that is neither regular nor a folder."""
    found = list[Path]()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = (Path(parent) / name).lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                found.append(Path(parent) / name)
    return found
