"""A worker's cache folder: whose it is, and with ``worker.cache_dir = "auto"`` where: in memory if there is room, else in the run's folder.

A patch of 1 % of a model touches nearly every page of its files, so that each version writes the whole model to a disk, but not to `/dev/shm`. The
workers of a host decide one after the other, under a lock: the copies of all that run, and of the one that decides, must fit into a share of
the memory that is free without them.

    /dev/shm/penstock-<uid>/<run>-<worker>-<hash of its folder on disk>/    as `mirror.py` says, and `needs`: the bytes of its copies

A killed worker cannot remove its copies, and its id may never be used again. So a worker that starts clears the folders beside its own, on
disk and in memory, that no running process has locked.

    python -m penstock.rollout_service.weights.cache_folder       # what would fit here
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.protocol.shared_device import try_lock
from penstock.protocol.weights import shared_segments as segments
from penstock.protocol.weights.shared_segments import SHARED_MEMORY, free_memory, locked_folder
from penstock.rollout_service.weights.mirror_slot import NUM_REGULAR_SLOTS

SHARE = 0.5  # of the free memory, for the copies of all workers of a host
_SLOTS = ("a", "b", "c", "d")
_FILES = "files"
_ADAPTERS = "adapters"
_PATCHES = "patches"
_LOCK = "lock"
_NEEDS = "needs"
_LOCK_DEADLINE_S, _LOCK_POLL_S = 2.0, 0.05
_GB = 1e9


class CacheFolder:
    """Exclusive use of one folder of copies."""

    def __init__(self, path: Path, memory: MemoryFolder | None = None) -> None:
        """Make and lock the folder, and clear those of workers that no longer run.

        Model folders of an earlier process with this worker id stay; its adapters are removed. Raises ConfigError when
        the folder cannot be made, or a running worker with the same id uses it.
        """
        self.path, self._memory = path, memory
        self.slots = tuple(path / name for name in _SLOTS)
        self.files = path / _FILES
        self.adapters = path / _ADAPTERS
        try:
            self._lock = _own_lock(path)
            for sibling in path.parent.iterdir():
                _clear_abandoned(sibling, whole=memory is not None)
            self.files.mkdir(exist_ok=True)
            for name in (_ADAPTERS, _PATCHES):
                shutil.rmtree(path / name, ignore_errors=True)
        except OSError as err:
            raise ConfigError(
                f"worker.cache_dir: cannot create {path} ({err.strerror}); choose a folder that can be written to"
            ) from None

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def clear(self) -> None:
        _clear(self.path)
        self.files.mkdir()

    def close(self) -> None:
        if not self._lock.closed:
            if self._memory is None:
                _clear(self.path)
                self.unlock()
                return
            shutil.rmtree(self.path, ignore_errors=True)
            self.unlock()

    def unlock(self) -> None:
        self._lock.close()


def _own_lock(folder: Path) -> io.FileIO:
    ends = time.monotonic() + _LOCK_DEADLINE_S
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if (lock := _lock(folder)) is not None:
            return lock
        if time.monotonic() > ends:  # longer than another worker takes to clear what looks abandoned
            raise ConfigError(
                f"another worker with the same worker.id is running and uses {folder}; choose another worker.id"
            )
        time.sleep(_LOCK_POLL_S)


def _lock(folder: Path) -> io.FileIO | None:
    """Lock a folder for as long as the returned file is open; None when another process has locked it, or removed it meanwhile."""
    file = io.FileIO(folder / _LOCK, "a")
    if try_lock(file.fileno(), fcntl.LOCK_EX) and _is_at(file.fileno(), folder / _LOCK):
        return file
    file.close()
    return None


def _is_at(file: int, path: Path) -> bool:
    """Return True if an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _clear_abandoned(folder: Path, *, whole: bool) -> None:
    """Empty a folder that no running worker uses; of one on disk the logs of its engines stay.

    ``whole``: remove it. The caller then holds the lock of all decisions, so that a folder without a lock is none that is being made, but
    what a worker left that was killed while it made or removed it.
    """
    with contextlib.suppress(FileNotFoundError):  # another worker removed it
        if not (folder / _LOCK).exists():
            if whole:
                shutil.rmtree(folder, ignore_errors=True)
        elif (lock := _lock(folder)) is not None:
            if whole:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                _clear(folder)
            lock.close()


def _clear(folder: Path) -> None:
    for name in (_FILES, _ADAPTERS, _PATCHES, *_SLOTS):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).with_suffix(".json").unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: what a file system in memory and the memory itself have left, and what copies of workers take or will take of it."""

    file_system: int
    memory: int
    written: int  # of the copies of workers that run, and of the one that decides
    needed: int  # by the workers that run, besides the one that decides

    @property
    def for_copies(self) -> int:
        return int(SHARE * (min(self.file_system, self.memory) + self.written))


def choose(num_bytes: int, room: Room) -> tuple[bool, str]:
    """Return True if the copies of a model of so many bytes belong into memory, and why; pure."""
    own = NUM_REGULAR_SLOTS * num_bytes
    least = "memory" if room.memory < room.file_system else f"{SHARED_MEMORY}"
    others = f" beside {room.needed / _GB:.2f} GB of other workers" if room.needed else ""
    figures = (
        f"{NUM_REGULAR_SLOTS} copies of {num_bytes / _GB:.2f} GB{others}, and {room.for_copies / _GB:.2f} GB "
        f"({SHARE:.0%} of what is free in {least}) may be used"
    )
    if own + room.needed <= room.for_copies:
        return True, f"in memory: {figures}"
    more = "give the container a larger /dev/shm, or set " if least != "memory" else "set "
    return False, f"on disk: {figures}; {more}worker.cache_dir"


class MemoryFolder:
    """The folder of this user's copies in memory, and the worker's own in it."""

    def __init__(self, home: Path, root: Path = SHARED_MEMORY) -> None:
        """``home`` is the worker's cache folder on disk, which no other worker uses; ``root`` a file system in memory."""
        self._root = root
        self.parent = root / f"penstock-{os.geteuid()}"
        run, worker = home.parts[-2:]
        self.path = self.parent / f"{run}-{worker}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}"

    def _room(self) -> Room:
        """Return what is free; folders of workers that do not run must have been cleared."""
        needed = written = 0
        for folder in self.parent.iterdir():
            written += _written(folder)
            if folder != self.path:
                with contextlib.suppress(OSError, ValueError):
                    needed += int((folder / _NEEDS).read_text())
        return Room(shutil.disk_usage(self._root).free, free_memory(), written, needed)

    def clear_abandoned(self, *, keep_own: bool) -> None:
        """Remove the folders of workers that no longer run; ``keep_own``: but this worker's own, which it may use again."""
        with locked_folder(self.parent, make=False) as (problem, parent):
            if not problem:
                self._clear_abandoned(parent, keep_own=keep_own)

    def take(self, num_bytes: int) -> tuple[CacheFolder | None, str]:
        """Return the worker's folder in memory for a model of so many bytes, or None if it belongs on disk, and why."""
        with locked_folder(self.parent) as (problem, parent):
            if problem:
                return None, f"on disk: {problem}"
            self._clear_abandoned(parent, keep_own=True)
            fits, reason = choose(num_bytes, self._room())
            try:
                if fits:
                    folder = CacheFolder(self.path, self)
                    (self.path / _NEEDS).write_text(str(NUM_REGULAR_SLOTS * num_bytes))
                    return folder, reason
            except (ConfigError, OSError) as err:
                return None, f"on disk: {err}"
            self._clear_abandoned(parent, keep_own=False)
            return None, reason

    def describe(self) -> str:
        """Return what would be kept in memory now."""
        with locked_folder(self.parent) as (problem, _):
            if problem:
                return f"copies of weights are kept in the run's folder: {problem}"
            room = self._room()
        most = max(0, room.for_copies - room.needed) / NUM_REGULAR_SLOTS / _GB
        return f"the copies of one more worker fit into {self._root} for a model of up to {most:.2f} GB; of a larger one they are in the run's folder; downloads that workers share take up to {segments.SHARE:.1%} of what is free"

    def _clear_abandoned(self, parent: Path, *, keep_own: bool) -> None:
        for folder in parent.iterdir():
            if folder.name != self.path.name or not keep_own:
                _clear_abandoned(folder, whole=True)


def _written(folder: Path) -> int:
    """Return the bytes of the files in a folder, which a worker may be writing and removing."""
    num_bytes = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(inside, name)).st_blocks * 512  # noqa: PTH118 - for each of many files
    return num_bytes


if __name__ == "__main__":
    sys.stdout.write(MemoryFolder(Path("/another/worker")).describe() + "\n")
