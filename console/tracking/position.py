"""How far a run has been written to one tracker: a small file in the run's folder, replaced after every batch.

``key`` is made before anything is written, so that a tracker finds its own run again. ``event`` is the last event whose
row is known to be written; a tracker that can tell what it holds (`TrackerWriter.last_event`) is asked as well, so that
rows between the two are not written again after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write, read_regular


class Position(BaseModel):
    """What a tracker has of a run."""

    model_config = ConfigDict(extra="forbid")

    key: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    event: Annotated[int, Field(ge=0)] = 0
    row: Annotated[int, Field(ge=0)] = 0  # the last of them that has a row
    steps: dict[str, int] = {}  # last step of each series
    finished: bool = False  # the run had ended at ``event``
    stored: list[str] = []  # tables and files, with the step of the run's end


class PositionFile:
    """The position of one tracker, locked while it is open."""

    def __init__(self, path: Path) -> None:
        """Use `opened` instead."""
        self._path = path
        self.position = self._read()

    def _read(self) -> Position:
        try:
            return Position.model_validate_json(read_regular(self._path))
        except FileNotFoundError:
            return Position(key=secrets.token_hex(8))
        except (OSError, ValidationError) as err:
            reason = err.strerror if isinstance(err, OSError) else "it was not written by penstock"
            raise ConfigError(
                f"{self._path} cannot be read ({reason}); remove it to write the whole run to a new run of the tracker"
            ) from None

    def save(self) -> None:
        """Replace the file; returns when it is on the disk."""
        atomic_write(self._path, json.dumps(self.position.model_dump()), sync=True)


@contextlib.contextmanager
def opened(folder: Path, label: str) -> Iterator[PositionFile]:
    """Open a tracker's position in a run's folder; raises ConfigError while another process of this machine writes it."""
    path = folder / "trackers" / f"{label}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as err:
        raise ConfigError(
            f"{path.parent} cannot be written ({err.strerror}); change its permissions, or set run.dir"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process writes this run to {label} already; stop it first") from None
        except OSError:  # a file system without locks
            pass
        yield PositionFile(path)
    finally:
        os.close(handle)


def read_marker(folder: Path, label: str) -> Path:
    """Return the file whose existence says that the process of a tracker needs the run's servers no more."""
    return folder / "trackers" / f"{label}.read"
