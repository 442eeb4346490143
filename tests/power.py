"""A disk whose power can be cut: a file system of its own, in a file, of which the kernel drops all that was not written to disk."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest

from tests.servers import require_package

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, with which xfstests cut the power
_AT_ONCE = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: not even the journal is written


class Disk:
    """An ext4 of some MB, mounted at ``folder``; needs root and a loop device."""

    def __init__(self, base: Path, *, mega_bytes: int = 256) -> None:
        require_package("/usr/sbin/mkfs.ext4", "e2fsprogs")
        if os.geteuid() != 0:
            pytest.skip("a file system of its own needs root")
        self._image, self.folder = base / "disk.img", base / "disk"
        self.folder.mkdir()
        with self._image.open("wb") as file:
            file.truncate(mega_bytes * 2**20)
        subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-F", str(self._image)], check=True, timeout=300)
        self._mount()

    def _mount(self) -> None:
        done = subprocess.run(
            ["mount", "-o", "loop", str(self._image), str(self.folder)],
            check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"no loop device can be mounted here: {done.stderr.strip()}")

    def lose_power(self) -> None:
        """Drop what is not on disk; from now on every write fails."""
        number = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(number, _SHUTDOWN, struct.pack("I", _AT_ONCE))
        finally:
            os.close(number)

    def start_again(self) -> None:
        """Mount what was on disk, as after a restart; all who had files open there have ended."""
        self.remove()
        self._mount()

    def remove(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True, timeout=300)
