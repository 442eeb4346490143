"""GPUs that engines and trainer of a run use in turns: locks of the system (`flock`), three files a device.

| file           | is locked by                               | means                                        |
|----------------|--------------------------------------------|----------------------------------------------|
| ``ID.run``     | every process of one run, together         | processes of other runs are refused          |
| ``ID.wanted``  | a rank of the trainer, alone               | engines release the device as soon as they can |
| ``ID.held``    | a rank of the trainer alone, or engines together | whose memory may be on the device      |

The kernel releases a lock when the last process that has its open file exits, also after SIGKILL: no state has to be
repaired. An engine's server inherits its worker's open file (`inherited`): a device is held until both have exited.

Nobody waits for one device while holding another, but for ranks of the trainer: engines hold all of their devices or
none, and release them all when one is wanted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from penstock.protocol.errors import ConfigError, DeviceTaken

Role = Literal["engine", "trainer"]
POLL_S = 0.02  # between two looks at the locks
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_EXCLUSIVE, _SHARED = fcntl.LOCK_EX, fcntl.LOCK_SH


def open_lock(folder: Path, device: str, kind: str) -> int:
    """Return the open file of a device's lock; raises ConfigError for a folder of another user, or not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{folder} is a link, or a folder of another user, who could hold up its locks; remove it, or set "
                "placement.lock_dir to a folder of this user"
            )
        path = folder / f"{_UNSAFE.sub('-', device)}.{kind}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise ConfigError(
            f"the locks of GPUs in {folder} cannot be used ({err.strerror}); set placement.lock_dir to a folder on a "
            "local disk that this user can write"
        ) from None


def try_lock(handle: int, lock: int) -> bool:
    """Return True if an open file could be locked (`fcntl.LOCK_EX` or `LOCK_SH`) at once."""
    try:
        fcntl.flock(handle, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SharedDevices:
    """The devices of one process; for one thread. A context manager that claims them for the run."""

    def __init__(self, devices: Sequence[str], folder: Path, *, role: Role, run_id: str) -> None:
        self._names = sorted({_UNSAFE.sub("-", device) for device in devices})
        self._folder, self._role, self._run_id = folder, role, run_id
        self._files: dict[str, int] = {}  # open files by name, each lock's own
        self.is_held = False
        self._wants = False  # this rank has said that it wants them

    def __enter__(self) -> SharedDevices:
        """Claim the devices for the run; raises DeviceTaken where another has one, ConfigError for the folder."""
        try:
            for name in self._names:
                for kind in ("run", "wanted", "held"):
                    self._files[f"{name}.{kind}"] = open_lock(self._folder, name, kind)
                self._claim(name)
        except (ConfigError, DeviceTaken, OSError):
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._forget_record()
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        self.is_held = self._wants = False

    @property
    def inherited(self) -> tuple[int, ...]:
        """Open files that a server's process must inherit: it holds the devices as long as it runs."""
        return tuple(self._files[f"{name}.held"] for name in self._names)

    @property
    def is_wanted(self) -> bool:
        """True while a rank of the trainer wants one of the devices, or has it."""
        return not all(self._is_free(name, "wanted") for name in self._names)

    @property
    def is_free(self) -> bool:
        """True while no process has a lock on one of the devices, this one included."""
        return self.is_held or all(self._is_free(name, "held") for name in self._names)

    def try_want(self) -> bool:
        """Announce that this rank wants its devices; False while another process does."""
        self._wants = self._wants or self._lock_all("wanted", _EXCLUSIVE)
        return self._wants

    def try_take(self) -> bool:
        """Take all devices, or none and return False: engines where none is wanted, a rank where none is held."""
        if not self.is_held:
            is_trainer = self._role == "trainer"
            if not is_trainer and self.is_wanted:
                return False
            self.is_held = self._lock_all("held", _EXCLUSIVE if is_trainer else _SHARED)
            if self.is_held:
                self._write_record()
        return self.is_held

    def give(self) -> None:
        self._forget_record()
        for kind in ("held", "wanted"):
            for name in self._names:
                fcntl.flock(self._files[f"{name}.{kind}"], fcntl.LOCK_UN)
        self.is_held = self._wants = False

    def holders(self) -> str:
        """Describe who has the devices, for messages: role, process id and since when."""
        now, found = time.time(), []
        for name in self._names:
            for path in sorted(self._folder.glob(f"{name}.*.json")):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    record = json.loads(path.read_text())
                    is_there = Path(f"/proc/{record['pid']}").exists()
                    exited = "" if is_there else ", which has exited; its engine may still be ending"
                    found.append(
                        f"{name}: {record['role']} of run {record['run_id']} (pid {record['pid']}{exited}), "
                        f"for {now - record['since']:.0f} s"
                    )
        return "; ".join(found) or f"{', '.join(self._names)}: no process has said that it has it"

    def _claim(self, name: str) -> None:
        """Lock the file of the run together with others of the same run; its text is the run's name."""
        handle = self._files[f"{name}.run"]
        deadline = time.monotonic() + 1.0  # a process that has just locked it alone writes its run's name
        while True:
            if try_lock(handle, _EXCLUSIVE):
                os.ftruncate(handle, 0)
                os.pwrite(handle, self._run_id.encode(), 0)
            if try_lock(handle, _SHARED):  # in place of the other lock, for a moment without one
                claimed_by = os.pread(handle, 1000, 0).decode("utf-8", "replace")
                if claimed_by == self._run_id:
                    return
                raise DeviceTaken(
                    f"GPU {name} is used by run {claimed_by}, run {self._run_id} cannot share it ({self.holders()}); "
                    "stop that run, or give this one other GPUs (CUDA_VISIBLE_DEVICES, placement.devices)"
                )
            if time.monotonic() > deadline:
                raise DeviceTaken(
                    f"GPU {name}: another process keeps {name}.run locked alone; end the process that `fuser` names"
                )
            time.sleep(POLL_S)

    def _lock_all(self, kind: str, lock: int) -> bool:
        locked = []
        for name in self._names:
            handle = self._files[f"{name}.{kind}"]
            if not try_lock(handle, lock):
                for other in locked:
                    fcntl.flock(other, fcntl.LOCK_UN)
                return False
            locked.append(handle)
        return True

    def _is_free(self, name: str, kind: str) -> bool:
        """Return True if a separately opened file can be locked: the lock of this process counts too."""
        handle = os.open(self._folder / f"{name}.{kind}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return try_lock(handle, _EXCLUSIVE)
        finally:
            os.close(handle)

    def _record(self, name: str) -> Path:
        return self._folder / f"{name}.{os.getpid()}.json"

    def _write_record(self) -> None:
        record = {"role": self._role, "run_id": self._run_id, "pid": os.getpid(), "since": time.time()}
        for name in self._names:
            if self._role == "trainer":  # it is alone: what others left is of processes that were killed
                for path in self._folder.glob(f"{name}.*.json"):
                    path.unlink(missing_ok=True)
            self._record(name).write_text(json.dumps(record))

    def _forget_record(self) -> None:
        for name in self._names if self.is_held else ():
            self._record(name).unlink(missing_ok=True)
