"""File systems of their own: one in a file, of which a power cut drops all that was not written, and small ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of a given size at ``folder``; the test is skipped without the right to mount one."""
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    if mount is None or not sys.platform.startswith("linux"):
        pytest.skip("a small file system needs Linux and mount")
    command = [mount, "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
