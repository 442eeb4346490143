"""Three files in a run's folder: the lock of a run on this machine, the request to pause it, why it failed.

The kernel releases the lock with its holders: the trainer, and the process that starts and restarts it.

`penstock train` removes the request when it starts. A trainer that sees it issues no new tasks, trains what is under
way, writes a checkpoint and exits. One that crashes meanwhile sees it again. Why a run ended with an error is kept
until its next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write, links_below
from penstock.protocol.secret_values import scrub

RUN_LOCK, SWEEP_LOCK = "run.lock", "sweep.lock"  # the latter of a sweep, in its first run
PAUSE = "pause-requested"
FAILURE = "failure.json"
NOTES = "notes.json"  # what its user wrote about the run on the live page
PLACEMENT = "placement.json"  # which GPUs of this machine the processes of the newest session got
WRITTEN = frozenset({  # names in a run's folder that its processes write or make
    "client.log", "config.json", "curve.png", "evaluations", FAILURE, "issued.log", "job.json", "job.lock",
    "launch.json", "launch.lock", "launch.log", "metrics.jsonl", NOTES, PAUSE, PLACEMENT, "planned-config.json",
    "readers_killed.json", "reading", "report.json", "report.md", "reward.port", "rolled_back.json", RUN_LOCK,
    "run.toml", SWEEP_LOCK, "tasks", "trainer.json", "watched.json",
})  # fmt: skip


def refuse_links(*paths: Path) -> None:
    """Raise ConfigError for a link, or no regular file, at or below paths of a folder to write to, maybe another's."""
    if link := next((link for path in paths for link in links_below(path)), None):
        raise ConfigError(f"{link} is a link or no regular file, and what it leads to would be written; remove it")


@contextlib.contextmanager
def hold_lock(folder: Path, name: str = RUN_LOCK) -> Iterator[None]:
    """Hold a lock of a run's folder, together with others; on a file system without locks nothing is held.

    Raises ConfigError when the folder cannot be written, and for a link of the name of a file that the run would write
    through it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = (folder / one for one in sorted({*WRITTEN, "logs"}))
        refuse_links(*(path for path in own if not (path.is_symlink() and path.is_dir())))
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise ConfigError(
            f"the run's folder {folder.absolute()} cannot be written ({err.strerror}); make it writable, or set run.dir"
        ) from None
    try:
        with contextlib.suppress(OSError):  # ENOLCK, EOPNOTSUPP: the run is not less for it
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def is_lock_held(folder: Path) -> bool:
    return is_locked(folder / RUN_LOCK)


def is_locked(path: Path) -> bool:
    """Return True while a process here holds a lock on a file, which is not created; no link is followed."""
    handle = _opened(path)
    if handle is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _opened(path: Path) -> int | None:
    for access in (os.O_RDWR, os.O_RDONLY):  # NFS locks for writing only what is open for writing
        with contextlib.suppress(OSError):
            return os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None


def request_pause(folder: Path) -> None:
    try:
        (folder / PAUSE).touch()
    except OSError as err:
        raise ConfigError(f"{folder / PAUSE} cannot be written ({err.strerror}); change its permissions") from None


def is_pause_requested(folder: Path) -> bool:
    return (folder / PAUSE).exists()


def withdraw_pause(folder: Path) -> None:
    try:
        (folder / PAUSE).unlink(missing_ok=True)
    except OSError as err:
        raise ConfigError(f"{folder / PAUSE} cannot be removed ({err.strerror}); remove it") from None


def begin(folder: Path) -> None:
    """Remove what an earlier start left: the request to pause, and why it failed."""
    withdraw_pause(folder)
    (folder / FAILURE).unlink(missing_ok=True)


def write_failure(folder: Path, reason: str, log_tail: str = "") -> None:
    """Keep why a run ended with an error, and the end of its log; does nothing for a run without a folder."""
    if folder.is_dir():
        last = (scrub(reason).strip().splitlines() or ["its log says why"])[-1]
        atomic_write(folder / FAILURE, json.dumps({"at": time.time(), "reason": last, "log": scrub(log_tail)}))
