"""A worker's cache folder: its layout on disk, and the lock that keeps one worker at a time in it.

    <cache>/a/ <cache>/b/ …  model folders, see `mirror_slot.py`
    <cache>/files/           config and tokenizer by their sha256, linked into the model folders
    <cache>/adapters/        one folder in PEFT's format for each adapter that is served
    <cache>/lock             locked while the worker's process runs

A killed worker cannot remove its copies, and its id may never be used again. So a worker that starts clears the
folders beside its own that no running process has locked.
"""

from __future__ import annotations

import fcntl
import io
import shutil
from pathlib import Path

from penstock.protocol.errors import ConfigError

_SLOTS = ("a", "b", "c", "d")
_FILES = "files"
_ADAPTERS = "adapters"
_LOCK = "lock"


class CacheFolder:
    """Exclusive use of one folder below ``worker.cache_dir``."""

    def __init__(self, path: Path) -> None:
        """Make and lock the folder, and clear those of workers that no longer run.

        Model folders of an earlier process with this worker id stay; its adapters are removed. Raises ConfigError when
        the folder cannot be made, or a running worker with the same id uses it.
        """
        self.path = path
        self.slots = tuple(path / name for name in _SLOTS)
        self.files = path / _FILES
        self.adapters = path / _ADAPTERS
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            if lock is None:
                raise ConfigError(
                    f"another worker with the same worker.id is running and uses {path}; choose another worker.id"
                )
            self._lock = lock
            for sibling in path.parent.iterdir():
                _clear_abandoned(sibling)
            self.files.mkdir(exist_ok=True)
            shutil.rmtree(self.adapters, ignore_errors=True)
        except OSError as err:
            raise ConfigError(
                f"worker.cache_dir: cannot create {path} ({err.strerror}); choose a folder that can be written to"
            ) from None

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def close(self) -> None:
        if not self._lock.closed:
            _clear(self.path)
            self.unlock()

    def unlock(self) -> None:
        """Unlock the folder and leave its contents, as the kernel does when the process ends."""
        self._lock.close()


def _lock(folder: Path) -> io.FileIO | None:
    """Lock a folder for as long as the returned file is open; None when another process has locked it."""
    file = io.FileIO(folder / _LOCK, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _clear_abandoned(folder: Path) -> None:
    if (folder / _LOCK).exists():
        lock = _lock(folder)
        if lock is not None:
            _clear(folder)
            lock.close()


def _clear(folder: Path) -> None:
    for name in (_FILES, _ADAPTERS, *_SLOTS):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).with_suffix(".json").unlink(missing_ok=True)
