"""Stored bytes of versions in shared memory, so that processes of a host, trainer and workers, save a download.

    /dev/shm/penstock-segments-<uid>/<run>/reader-…        locked by a worker, as long as it runs
                                           <sha256>        the stored bytes of a bucket: a `StoredRange` of a manifest
                                           <sha256>.lock   locked by the worker that fetches them

The object store has every byte before a version is announced: nothing that is lost here is missed. A file is called by
its content's hash, so no message says where to look, and an old version's, another run's or a rolled-back one's cannot
be taken for another. It is copied into the reader's own memory, and compared there: a file that changes or is cut short
meanwhile is a miss, and never SIGBUS, as it would be if mapped.

Workers make the folder. Without one there, or in a container whose `/dev/shm` is its own, a trainer writes nothing, and
a worker alone writes nothing either. The kernel releases the locks of a killed process. What killed workers leave goes
with the run's next version there, the start or end of any worker of this user, or `penstock runs rm`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import structlog

from penstock.protocol import files
from penstock.protocol.shared_device import try_lock

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folders below belong to this user alone
SHARE = 0.125  # of the free memory, for one run's segments
KEPT_S = 600.0  # most workers of the host have read a version by then
FETCH_DEADLINE_S = 60.0  # another worker's download: then this one downloads too
# Where a worker's bytes came from (peer: a worker of another host), and why not from shared memory: nobody had put them
# there, they were not what the manifest says, they or the folder cannot be read or are not this user's alone, another
# worker fetched them for too long; or they could not be stored for the others.
STORES = ("shared_memory", "peer", "s3")
MISSES = ("absent", "altered", "unreadable", "busy", "full")
# Why not from a peer: it does not have them, they are not the manifest's, it sends to others, refuses, was too slow.
PEER_MISSES = ("absent", "altered", "busy", "refused", "slow", "unreachable")
_DECISION_DEADLINE_S, _LOCK_POLL_S = 10.0, 0.01
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_READER, _LOCK = "reader-", ".lock"
log = structlog.get_logger("shared_segments")


class SharedSegments:
    """A process's view of a run's folder. Thread-safe; `join` makes it, and nothing raises but a caller's download."""

    def __init__(self, run_id: str, root: Path = SHARED_MEMORY) -> None:
        self._root, self._parent = root, root / f"penstock-segments-{os.geteuid()}"
        self.folder = self._parent / run_id
        self._reader: tuple[Path, int] | None = None  # the open file that says that this process reads
        self._num_bytes, self._misses, self._peer_misses = Counter[str](), Counter[str](), Counter[str]()
        self._without = "off"  # why this process does not read: by setting, which is no miss
        self._lock = threading.Lock()  # of the counters
        # Reads a segment, by hash, size and version, from a host that reads from this one too; None if it cannot.
        self.from_peers: Callable[[str, int, int], bytes | None] | None = None
        self._asked = self.fetched_up_to = -1  # newest version asked for; newest one of which nothing more is fetched

    def join(self) -> None:
        """Read here from now on, and remove the folders of runs that nobody reads."""
        self._without = "unreadable"
        with locked_folder(self._parent) as (problem, parent):
            try:
                if not problem:
                    _clear_abandoned(parent)
                    self.folder.mkdir(mode=0o700, exist_ok=True)
                    name = secrets.token_hex(8)
                    handle = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    try_lock(
                        handle, fcntl.LOCK_EX
                    )  # before it has a name of a reader, which nobody has locked if it is a killed one's
                    self._reader = files.replace(self.folder / name, self.folder / f"{_READER}{name}"), handle
            except OSError as err:
                problem = f"{self.folder} cannot be used ({err.strerror})"
        if problem:
            log.warning("weights are not read from shared memory", folder=str(self.folder), reason=problem)

    @property
    def is_joined(self) -> bool:
        return self._reader is not None

    def close(self) -> None:
        """Read no more; the last reader removes the folder."""
        if self._reader is not None:
            (path, handle), self._reader = self._reader, None
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(handle)
            self.clear_abandoned()

    def clear_abandoned(self, deadline_s: float = _DECISION_DEADLINE_S) -> None:
        """Remove the folders of this user's runs that nobody reads, once no other process decides about them."""
        with locked_folder(self._parent, deadline_s, make=False) as (problem, parent), contextlib.suppress(OSError):
            if not problem:
                _clear_abandoned(parent)

    def figures(self) -> dict[str, float]:
        """Return bytes by store and misses by reason, as figures of a worker's heartbeat."""
        with self._lock:
            num_bytes = {f"weights_bytes_{store}": float(self._num_bytes[store]) for store in STORES}
            num_bytes |= {f"weights_misses_{reason}": float(self._misses[reason]) for reason in MISSES}
            misses = self._peer_misses
            return num_bytes | {f"weights_peer_misses_{reason}": float(misses[reason]) for reason in PEER_MISSES}

    def peer_missed(self, reason: str) -> dict[str, int]:
        """Count a segment that a peer did not send, for one of `PEER_MISSES`; return the misses until now."""
        with self._lock:
            self._peer_misses[reason] += 1
            return dict(self._peer_misses)

    def offer(self, sha256: str, data: bytes) -> None:
        """Store bytes for the workers of this host, if there are any; else remove what killed ones have left."""
        if self._num_readers():
            self._put(sha256, data)
        else:
            self.clear_abandoned(0.0)

    def fetch(self, sha256: str, size_bytes: int, download: Callable[[], bytes], version: int = 0) -> bytes:
        """Return bytes of this hash: those here, else what a peer or ``download`` returns, once for all who ask.

        ``version`` is that of the manifest that names them.
        """
        store, self._asked = "shared_memory", max(self._asked, version)

        def load() -> bytes:
            nonlocal store
            data = self.from_peers(sha256, size_bytes, version) if self.from_peers is not None else None
            store = "s3" if data is None else "peer"
            return download() if data is None else data

        data, miss = self._read(sha256, size_bytes)
        is_shared = miss == "absent" and self._num_readers() > (self.from_peers is None)
        if is_shared and self._make_room(size_bytes):
            with self._only_one(sha256) as is_only:
                data, miss = self._read(sha256, size_bytes)
                if data is None:
                    data, miss = load(), miss if is_only else "busy"
                    if is_only:
                        self._put(sha256, data)
        elif data is None:
            data, miss = load(), "full" if is_shared else miss
        self._count(miss, len(data), store)
        return data

    def trim(self) -> None:
        """Remove what is older than `KEPT_S`."""
        self.fetched_up_to = self._asked
        if self._reader is not None:
            self._make_room(0)

    def open(self, sha256: str) -> BinaryIO | None:
        """Return the open file of a segment, for a peer, who verifies what it is sent; None: it is not here."""
        with contextlib.suppress(OSError):
            return files.open_regular(self.folder / sha256)
        return None

    def host_id(self) -> str:
        """Return a name of the folder, for all that share it; raises OSError where this process does not read."""
        found = self.folder.stat()
        text = f"{_BOOT_ID.read_text()} {found.st_dev} {found.st_ino}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _count(self, miss: str, num_bytes: int = 0, store: str = "") -> None:
        with self._lock:
            self._num_bytes[store] += num_bytes
            self._misses[miss] += bool(miss)

    def _read(self, sha256: str, size_bytes: int) -> tuple[bytes | None, str]:
        """Return the bytes, verified in this process's own memory; or None, and why."""
        if self._reader is None:
            return None, self._without
        path = self.folder / sha256
        try:
            data = files.read_regular(path, size_bytes + 1)
        except FileNotFoundError:
            return None, "absent"
        except OSError:
            return None, "unreadable"
        if len(data) == size_bytes and hashlib.sha256(data).hexdigest() == sha256:
            return data, ""
        with contextlib.suppress(OSError):
            path.unlink()
        return None, "altered"

    def _put(self, sha256: str, data: bytes) -> None:
        path, problem = self.folder / sha256, f"more than {SHARE:.1%} of the free memory"
        try:
            if path.exists():
                return
            if self._make_room(len(data)):
                files.atomic_write(path, data, mode=0o600)
                return
        except OSError as err:  # a full file system says so at the write
            problem = str(err)
        if not self._misses["full"]:
            log.warning(
                "bytes of versions are not shared with workers of this host", size_bytes=len(data), reason=problem
            )
        self._count("full")

    def _make_room(self, num_bytes: int) -> bool:
        """Remove what is old, and then the oldest until so many bytes more fit; False if they never can."""
        found, now = [], time.time()
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if not entry.name.startswith(_READER):
                            of = entry.stat(follow_symlinks=False)
                            found.append((of.st_mtime, of.st_blocks * 512, entry.path))
            taken = sum(size for _, size, _ in found)
            most = SHARE * (min(shutil.disk_usage(self._root).free, free_memory()) + taken)
        except OSError:  # somebody removed the folder
            return False
        for modified, size, path in sorted(found):
            if now - modified < KEPT_S and (taken + num_bytes <= most or num_bytes > most):
                break
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - of a string
                taken -= size
        return taken + num_bytes <= most

    @contextlib.contextmanager
    def _only_one(self, sha256: str) -> Iterator[bool]:
        """Let one worker of the host at a time into the block; False after `FETCH_DEADLINE_S`, or without a lock."""
        path = self.folder / f"{sha256}{_LOCK}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            yield False
            return
        try:
            yield (is_only := locked_within(handle, FETCH_DEADLINE_S))
            if is_only:
                with contextlib.suppress(OSError):
                    path.unlink()
        finally:
            os.close(handle)

    def _num_readers(self) -> int:
        """Return how many workers read here; 0 where another user could, who made the folder above first."""
        try:
            return _num_readers(self.folder) if _is_private(self._parent.lstat()) else 0
        except OSError:
            return 0


def _clear_abandoned(parent: Path) -> None:
    """Remove the folders that nobody reads; the caller has locked the one above."""
    for folder in parent.iterdir():
        if not _num_readers(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _num_readers(folder: Path) -> int:
    num_readers = 0
    for path in folder.glob(f"{_READER}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if try_lock(file.fileno(), fcntl.LOCK_SH):
                path.unlink()  # of a killed one
            else:
                num_readers += 1
    return num_readers


@contextlib.contextmanager
def locked_folder(
    folder: Path, deadline_s: float = _DECISION_DEADLINE_S, *, make: bool = True
) -> Iterator[tuple[str, Path]]:
    """Lock a folder of this user alone, and give "" and a path that leads to no other; else why it is not usable.

    It stays when it is empty: removed, it would be another one for a process that waits for it.
    """
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as err:
        yield f"{folder} cannot be used ({err.strerror})", folder
        return
    try:
        if not _is_private(os.fstat(file)):
            problem = f"{folder} is not a folder of this user alone"
        elif not locked_within(file, deadline_s):
            problem = f"another process has decided for more than {deadline_s:.0f} s about {folder}"
        else:
            problem = ""
        yield problem, Path(f"/proc/self/fd/{file}")  # where others may rename: a folder without the sticky bit
    finally:
        os.close(file)


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def locked_within(file: int, deadline_s: float) -> bool:
    ends = time.monotonic() + deadline_s
    while not try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() >= ends:
            return False
        time.sleep(_LOCK_POLL_S)
    return True


def free_memory() -> int:
    """Return the bytes that may still be allocated: of the machine, and of this process's control groups (v1, v2)."""
    free = [_number(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controller, path = line.split(":", 2)
            maximum, current, cache = _LIMITS.get(controller, ("",) * 3)
            group = _CGROUPS / controller / path.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # not limited, or not a control group
                    limit, used = (int((folder / name).read_text()) for name in (maximum, current))
                    free.append(max(0, limit - used + _number(folder / "memory.stat", cache)))
    return min(free)


def _number(file: Path, name: str) -> int:
    """Return the number after a name in a file of lines; 0 if there is none."""
    try:
        words = (line.split() for line in file.read_text().splitlines())
        return next(int(line[1]) for line in words if line[0] == name)
    except (OSError, StopIteration):
        return 0
