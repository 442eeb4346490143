"""What the sessions of a run have issued, on disk before its tasks are published; a group that is not in it is foreign.

A checkpoint holds what was issued until it was made. Groups that were issued after it, by a session that was killed since,
are known from this file alone: one line for every issue, with the id of the data order, the position that it reached, and
the ids of later attempts. First attempts need no separate line: they are the prompts before that position. A line
before those of a session says which size and length of groups its settings asked for: a group that comes after a restart
is held against the settings it was issued under. A file that has grown is written again with one line for each settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.protocol import files
from penstock.protocol.packs.task_promise import TaskSettings
from penstock.trainer.errors import CheckpointError

_FILE = "issued.log"
_SETTINGS = "settings"  # first word of their lines, where others have the id of an order: older builds skip them
_MERGE_BYTES = 1 << 20  # some ten thousand issues


class SessionSettings(NamedTuple):
    train: TaskSettings
    evaluation: TaskSettings


class IssuedRange(NamedTuple):
    """What was issued under the same settings: first attempts from ``first`` to before ``position``, and later attempts."""

    settings: SessionSettings | None  # None: a build that did not record them
    first: int
    position: int
    later: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class IssuedBefore:
    position: int = 0
    later: frozenset[str] = frozenset()
    ranges: tuple[IssuedRange, ...] = ()

    def settings_of(self, group_id: str, position: int | None) -> tuple[TaskSettings, ...]:
        """Return the settings under which a group was issued; ``position`` is None for a later attempt."""
        recorded = [
            each.settings
            for each in self.ranges
            if (group_id in each.later if position is None else each.first <= position < each.position)
        ]
        known = [settings.train for settings in recorded if settings is not None]
        return tuple(dict.fromkeys(known)) if len(known) == len(recorded) else ()

    def all_settings(self) -> tuple[SessionSettings, ...]:
        """Return the settings of all earlier sessions; empty if those of one are not known."""
        known = [each.settings for each in self.ranges if each.settings is not None]
        return tuple(dict.fromkeys(known)) if len(known) == len(self.ranges) else ()


class IssueLog:
    def __init__(
        self,
        folder: Path,
        order_id: str,
        *,
        may_arrive: Callable[[str], bool] = lambda _: True,
        settings: SessionSettings | None = None,
        first: int = 0,
    ) -> None:
        """Read what earlier sessions issued, and write it again with a single line for each of their settings.

        Lines of another data order, and attempts that may not arrive, are removed. This session starts at the position ``first``.
        Raises CheckpointError.
        """
        self._path, self._order_id = folder / _FILE, order_id
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ranges = [
                each._replace(later=frozenset(filter(may_arrive, each.later))) for each in _read(self._path, order_id)
            ]
            self.before = _sum(ranges)
            current = [] if settings is None else [IssuedRange(settings, first, first)]
            self._file, self._size = self._write_again([*ranges, *current])
        except OSError as err:
            raise self._failure(err) from err
        self._merge_above = max(_MERGE_BYTES, 2 * self._size)

    def append(self, position: int, group_ids: Iterable[str]) -> None:
        """Write that groups before ``position`` were issued, and sync it; raises CheckpointError."""
        try:
            self._size += _write(self._file, self._line(position, [i for i in group_ids if not i.endswith(".a0")]))
            if self._size > self._merge_above:
                self._merge()
        except OSError as err:
            raise self._failure(err) from err

    def close(self) -> None:
        os.close(self._file)

    def _merge(self) -> None:
        """Replace the lines by their sum: a resumed checkpoint may be older than any of them, so no id is removed."""
        appended_to = self._file
        self._file, self._size = self._write_again(_read(self._path, self._order_id))
        os.close(appended_to)
        self._merge_above = max(_MERGE_BYTES, 2 * self._size)

    def _write_again(self, issued: Sequence[IssuedRange]) -> tuple[int, int]:
        partial = self._path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        file = os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = _write(file, b"".join(map(self._lines, issued)) or self._line(0, ()))
            files.replace(partial, self._path)
        except OSError:
            os.close(file)
            raise
        return file, size

    def _lines(self, issued: IssuedRange) -> bytes:
        line = self._line(issued.position, sorted(issued.later))
        if issued.settings is None:
            return line
        settings = {name: part._asdict() for name, part in issued.settings._asdict().items()}
        head = f"{_SETTINGS} {self._order_id} {issued.first} {json.dumps(settings, separators=(',', ':'))}\n"
        return head.encode() + line

    def _line(self, position: int, later: Iterable[str]) -> bytes:
        return " ".join([self._order_id, str(position), *later, "\n"]).encode()

    def _failure(self, err: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: issued groups could not be recorded ({type(err).__name__}: {err}); a session after this one "
            "would refuse them. Free disk space below run.dir, or make it writable, and start the trainer again"
        )


def _write(file: int, line: bytes) -> int:
    written = os.write(file, line)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")
    os.fdatasync(file)
    return written


def _read(path: Path, order_id: str) -> list[IssuedRange]:
    """Return the sum of all whole lines of a data order, for each settings; a line that a crash cut short has no end.

    A session with the settings of the session before continues its range.
    """
    ranges: list[IssuedRange] = []
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                first, *rest = line.split(" ")
                if first == _SETTINGS and rest[:1] == [order_id] and line.endswith("\n"):
                    ranges = _started(ranges, line)
                elif first == order_id and rest[-1:] == ["\n"] and rest[0].isdecimal():
                    now = ranges.pop() if ranges else IssuedRange(None, 0, 0)
                    later = now.later.union(rest[1:-1]) if rest[1:-1] else now.later
                    ranges.append(now._replace(position=max(now.position, int(rest[0])), later=later))
    return ranges


def _started(ranges: list[IssuedRange], line: str) -> list[IssuedRange]:
    try:
        _, _, number, document = line.split(" ", 3)
        first, values = int(number), json.loads(document)
        settings = SessionSettings(TaskSettings(**values["train"]), TaskSettings(**values["evaluation"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return [*ranges, IssuedRange(None, 0, 0)]
    if ranges and ranges[-1].settings == settings and first <= ranges[-1].position:
        return [*ranges[:-1], ranges[-1]._replace(first=min(first, ranges[-1].first))]
    return [*ranges, IssuedRange(settings, first, first)]


def _sum(ranges: Sequence[IssuedRange]) -> IssuedBefore:
    position = max((each.position for each in ranges), default=0)
    later = frozenset[str]().union(*(each.later for each in ranges))
    return IssuedBefore(position, later, tuple(ranges) if any(each.settings for each in ranges) else ())
