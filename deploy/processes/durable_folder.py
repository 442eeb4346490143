"""A folder whose files are on disk as soon as they are written, for a program that never calls fsync.

`rclone serve s3` is one: after a power loss, objects that it had acknowledged are empty. ``chattr +SD`` has the kernel write through:
a write returns when its data is on disk, a new name or a rename when the folder is. New folders below inherit it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_GET, _SET = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_WRITE_THROUGH = 0x00000008 | 0x00010000  # FS_SYNC_FL, FS_DIRSYNC_FL


def make_durable(folder: Path) -> None:
    """Have everything below an existing folder written through.

    Raises:
        OSError: The file system has no such attributes, or the folder is another user's.
    """
    if _is_durable(folder):
        return  # and what was made in it since
    for path, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            _set(Path(path) / name)
    _set(folder)  # last: it says that all below have it


def _is_durable(folder: Path) -> bool:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return _flags(number) & _WRITE_THROUGH == _WRITE_THROUGH
    finally:
        os.close(number)


def _set(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(number, _SET, struct.pack("l", _flags(number) | _WRITE_THROUGH))
    finally:
        os.close(number)


def _flags(number: int) -> int:
    found: int = struct.unpack("l", fcntl.ioctl(number, _GET, struct.pack("l", 0)))[0]
    return found
