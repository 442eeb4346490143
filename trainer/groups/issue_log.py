"""What the sessions of a run have issued, on disk before its tasks are published; a group that is not in it is foreign.

A checkpoint holds what was issued until it was made. Groups that were issued after it, by a session that was killed since,
are known from this file alone: one line for every issue, with the id of the data order, the position that it reached, and
the ids of later attempts. First attempts need no line of their own: they are the prompts before that position.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.trainer.errors import CheckpointError

_FILE = "issued.log"


@dataclass(frozen=True, slots=True)
class IssuedBefore:
    """What earlier sessions issued: every first attempt before ``position``, and these later attempts."""

    position: int = 0
    later: frozenset[str] = frozenset()


class IssueLog:
    """The file of one run; only its trainer may use it."""

    def __init__(self, folder: Path, order_id: str, *, may_arrive: Callable[[str], bool] = lambda _: True) -> None:
        """Read what earlier sessions issued, and write it again as a single line.

        Args:
            folder: Of the run.
            order_id: Id of the data order; lines of another order are removed.
            may_arrive: Returns True for a later attempt that can still be used; the others are removed.

        Raises:
            CheckpointError: The file cannot be read or written.
        """
        self._path, self._order_id = folder / _FILE, order_id
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = _read(self._path, order_id)
            self.before = IssuedBefore(found.position, frozenset(filter(may_arrive, found.later)))
            partial = self._path.with_suffix(".partial")
            partial.write_bytes(self._line(self.before.position, sorted(self.before.later)))
            partial.replace(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as err:
            raise self._failure(err) from err

    def append(self, position: int, group_ids: Iterable[str]) -> None:
        """Write that groups were issued, and sync it to disk; raises CheckpointError when that fails.

        Args:
            position: The next position of the data order after them.
            group_ids: Their ids; first attempts are left out, since the position includes them.
        """
        try:
            os.write(self._file, self._line(position, [i for i in group_ids if not i.endswith(".a0")]))
            os.fdatasync(self._file)
        except OSError as err:
            raise self._failure(err) from err

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _line(self, position: int, later: Iterable[str]) -> bytes:
        return " ".join([self._order_id, str(position), *later, "\n"]).encode()

    def _failure(self, err: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: issued groups could not be recorded ({type(err).__name__}: {err}); a session after this one "
            "would refuse them. Free disk space below run.dir, or make it writable, and start the trainer again"
        )


def _read(path: Path, order_id: str) -> IssuedBefore:
    """Return the sum of all whole lines of a data order; a line that a crash cut short ends without a blank."""
    position, later = 0, set[str]()
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                first, *rest = line.split(" ")
                if first == order_id and rest[-1:] == ["\n"] and rest[0].isdecimal():
                    position = max(position, int(rest[0]))
                    later.update(rest[1:-1])
    return IssuedBefore(position, frozenset(later))
