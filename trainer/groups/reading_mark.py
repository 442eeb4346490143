"""The pack that is being read, marked in the run folder, so that a pack that kills the trainer is known by name.

The mark survives the process and not the machine: a file that is written and not synced. It is set when the bytes of a
pack have arrived and removed when its groups are held, so a trainer that is killed at any other moment, or stopped, leaves
none. A pack that was marked when two trainers ended is not read a third time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.facts import BlobRef
from penstock.protocol.files import atomic_write

log = structlog.get_logger("trainer.groups.reading_mark")

_MARK, _COUNTS = "reading", "readers_killed.json"
_MOST_KILLED = 2
_MAX_KNOWN = 1000  # packs with a count; the oldest are forgotten


class ReadingMark:
    """The mark of one run; only its trainer may use it."""

    def __init__(self, folder: Path) -> None:
        """Read the mark that an earlier session left, and count it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._counts_path = folder / _COUNTS
        self._file = os.open(folder / _MARK, os.O_RDWR | os.O_CREAT, 0o644)
        self._killed = self._read_counts()
        if left := os.pread(self._file, 4096, 0).split(b"\n")[0].decode("utf-8", "replace"):
            self._killed[left] = self._killed.pop(left, 0) + 1
            log.warning("the trainer was killed while it read a pack", pack=left, times=self._killed[left])
            self._write_counts()
        self.clear()

    def is_quarantined(self, pack: BlobRef) -> bool:
        """Return True if trainers were killed while they read this pack, as often as is allowed."""
        return self._killed.get(_name(pack), 0) >= _MOST_KILLED

    def set(self, pack: BlobRef) -> None:
        """Mark a pack whose bytes have arrived, before anything in them is interpreted."""
        os.pwrite(self._file, _name(pack).encode() + b"\n", 0)

    @contextlib.contextmanager
    def cleared_unless_fatal(self) -> Iterator[None]:
        """Clear the mark at the end of the block, or when it refuses the pack; any other exception ends the trainer."""
        try:
            yield
        except PenstockError:
            self.clear()
            raise
        self.clear()

    def clear(self) -> None:
        os.pwrite(self._file, b"\n", 0)

    def close(self) -> None:
        os.close(self._file)

    def _read_counts(self) -> dict[str, int]:
        try:
            stored = json.loads(self._counts_path.read_bytes())
            return {str(name): int(count) for name, count in stored.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as err:
            log.warning("counts of packs that killed the trainer are unreadable: counted anew", error=str(err))
            return {}

    def _write_counts(self) -> None:
        newest = dict(list(self._killed.items())[-_MAX_KNOWN:])
        atomic_write(self._counts_path, json.dumps(newest))


def _name(pack: BlobRef) -> str:
    return pack.key.replace("\n", " ")
