"""What the sessions of a run have issued, on disk before its tasks are published; a group that is not in it is foreign.

A checkpoint holds what was issued until it was made. Groups that were issued after it, by a session that was killed since,
are known from this file alone: one line for every issue, with the id of the data order, the position that it reached, and
the ids of later attempts. First attempts need no line of their own: they are the prompts before that position. A file
that has grown is written again as one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.trainer.errors import CheckpointError

_FILE = "issued.log"
_MERGE_BYTES = 1 << 20  # some ten thousand issues


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
            self._file, self._size = self._write_again(self.before)
        except OSError as err:
            raise self._failure(err) from err
        self._merge_above = max(_MERGE_BYTES, 2 * self._size)

    def append(self, position: int, group_ids: Iterable[str]) -> None:
        """Write that groups were issued, and sync it to disk; raises CheckpointError when that fails.

        Args:
            position: The next position of the data order after them.
            group_ids: Their ids; first attempts are left out, since the position includes them.
        """
        try:
            self._size += _write(self._file, self._line(position, [i for i in group_ids if not i.endswith(".a0")]))
            if self._size > self._merge_above:
                self._merge()
        except OSError as err:
            raise self._failure(err) from err

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _merge(self) -> None:
        """Replace the lines by their sum: a resumed checkpoint may be older than any of them, so no id is removed."""
        appended_to = self._file
        self._file, self._size = self._write_again(_read(self._path, self._order_id))
        os.close(appended_to)
        self._merge_above = max(_MERGE_BYTES, 2 * self._size)

    def _write_again(self, issued: IssuedBefore) -> tuple[int, int]:
        """Replace the file by one line in one atomic step; return the new file, open for appending, and its size."""
        partial = self._path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        file = os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = _write(file, self._line(issued.position, sorted(issued.later)))
            partial.replace(self._path)
        except OSError:
            os.close(file)
            raise
        return file, size

    def _line(self, position: int, later: Iterable[str]) -> bytes:
        return " ".join([self._order_id, str(position), *later, "\n"]).encode()

    def _failure(self, err: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: issued groups could not be recorded ({type(err).__name__}: {err}); a session after this one "
            "would refuse them. Free disk space below run.dir, or make it writable, and start the trainer again"
        )


def _write(file: int, line: bytes) -> int:
    """Write a line and sync it to disk; return its length. Raises OSError, also when only a part was written."""
    written = os.write(file, line)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")
    os.fdatasync(file)
    return written


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
