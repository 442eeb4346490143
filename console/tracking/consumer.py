"""Write the events of one run to one tracker, in their order, from the last position.

An event is one row of numbers by name, each step once; a run that has ended also gives a table of samples and a report.
The library is asked what it holds (`TrackerWriter.last_event`); where it cannot tell, the position file in the run's
folder counts, which is replaced after each batch, once the batch was flushed. Its ``key`` is created before anything is
written, so that a tracker finds its run again. The run never waits: events are read as by `penstock watch`, and an
error ends this process only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field

from penstock.console.connections import NamedRun
from penstock.console.record.lineage import Member, open_record, packs_of, read_texts, version_lineage
from penstock.console.report.curves import METRICS
from penstock.console.report.event_fields import StateFields, UnreadableEvent, number, read
from penstock.console.tracking.interface import EVENT, Destination, Row, TrackerWriter
from penstock.console.tracking.sources import Events
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.facts import RunEvent
from penstock.protocol.files import atomic_write, read_document, read_regular
from penstock.protocol.secret_values import hide

_GROUPS = {"step": "train", "eval": "eval"}  # kind of event -> prefix of its names
_HISTOGRAMS = ("staleness_tokens",)  # by age: a name for each age would be a chart for each age
_NO_FIGURES = ("step",)
_MOST_VALUES = 1000  # of one event
Samples = tuple[int, list[tuple[int, str, str, float]]]  # a step, and rows of SAMPLE_COLUMNS
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reward")
REPORT_FILES = ("report.md", "report.json", "curve.png")
_TEXT_CHARS = 4000
log = structlog.get_logger("console.tracking")
_BATCH = 256
_WHO_FINISHES = ("trainer", "log")  # Penstock's trainer; another one, by `MetricsLog`
_WAIT_S = 0.2
_QUIET_S = 10.0  # without an event, at the end of a run
_REPORT_S = 30.0  # from the end of the run to its report
_MOST_CONFIG_BYTES = 1024**2


class RowFold:
    """Turns the events of a run into rows.

    A step or an evaluation that a resumed trainer repeats is left out: trackers cannot take back what they show.
    ``steps`` are the last steps so far by series, for a reader that resumes.
    """

    def __init__(self, steps: Mapping[str, int] | None = None) -> None:
        self.steps: dict[str, int] = dict(steps or {})
        self.num_repeated = 0

    def row(self, event: int, fact: RunEvent) -> Row | None:
        """Return the row of an event; None for one without figures, or of a step that was there before."""
        if fact.kind == METRICS:
            step, values = fact.data.get("step"), dict(figures(fact.data.get("values")))
            return self._row(event, fact.at, step, values)
        group = _GROUPS.get(fact.kind)
        if group is None:
            return None
        name = fact.data.get("name")
        series = f"{group}/{name}" if isinstance(name, str) and name else group
        step = fact.data.get("step")
        if step is None or not _is_step(step):
            return None
        if step <= self.steps.get(series, -1):
            self.num_repeated += 1
            return None
        self.steps[series] = step
        data = {key: value for key, value in fact.data.items() if key not in (*_NO_FIGURES, *_HISTOGRAMS)}
        return self._row(event, fact.at, step, {f"{series}/{key}": value for key, value in figures(data)})

    @staticmethod
    def _row(event: int, at: float, step: Any, values: dict[str, float]) -> Row | None:
        if not values or not _is_step(step):
            return None
        return Row(event, step, at, {**values, EVENT: float(event)})


def figures(data: Any) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested tables as ``outer/inner``, at most a thousand; other values are left out."""
    pairs = _figures(data, "") if isinstance(data, Mapping) else iter(())
    for _, pair in zip(range(_MOST_VALUES), pairs, strict=False):
        yield pair


def _figures(data: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key}/")
        elif (figure := number(value)) is not None:
            yield f"{prefix}{key}", figure


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def read_samples(run: NamedRun, most: int) -> Samples:
    """Return the newest step in the record, and trained completions of the newest versions."""
    record, blobs = open_record(run)
    chosen: list[tuple[int, Member]] = []
    for step in reversed(record.steps):
        members = version_lineage(record, step.made_version).groups
        chosen += [(step.step, member) for member in members]
        if sum(len(member.rewards) for _, member in chosen) >= most:
            break
    read_texts([member for _, member in chosen], packs_of(record), blobs)
    rows = [
        (step, member.prompt_text[:_TEXT_CHARS], completion[:_TEXT_CHARS], reward)
        for step, member in chosen
        for completion, reward in zip(member.completions, member.rewards, strict=False)
    ]
    return record.steps[-1].step if record.steps else 0, rows[:most]


def report_files(folder: Path) -> list[Path]:
    return [path for name in REPORT_FILES if (path := folder / name).is_file() and not path.is_symlink()]


class Position(BaseModel):
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
        self._path = path
        self.position = self._read()

    def _read(self) -> Position:
        try:
            return Position.model_validate_json(read_document(self._path))
        except FileNotFoundError:
            return Position(key=secrets.token_hex(8))
        except (OSError, ValueError) as err:
            reason = err.strerror if isinstance(err, OSError) else "it was not written by penstock"
            raise ConfigError(
                f"{self._path} cannot be read ({reason}); remove it to write the whole run to a new run of the tracker"
            ) from None

    def save(self) -> None:
        """Replace the file; returns when it is on the disk."""
        atomic_write(self._path, json.dumps(self.position.model_dump()), sync=True)


@contextlib.contextmanager
def opened(folder: Path, label: str) -> Iterator[PositionFile]:
    """Open a tracker's position in a run's folder; raises ConfigError while another process here writes it."""
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


@dataclass(frozen=True, slots=True)
class Job:
    run_id: str
    folder: Path  # of the run, or of a training on given answers; its position, settings and report are there
    open: Callable[[Destination], TrackerWriter]
    destination: Destination  # without its key and the run's settings
    read_samples: Callable[[], Samples] | None = None
    once: bool = False  # write what is there, then end, finished or not
    awaits_report: bool = False  # it will be written after the run has ended
    on_read: Callable[[], object] = lambda: None  # called once nothing of the run's servers is needed any more


@dataclass(slots=True)
class Written:
    num_rows: int = 0
    num_repeated: int = 0
    finished: bool = False


class Consumer:
    """One run, one tracker. `work` returns when the run has ended, at a stop, or (``once``) when all is written."""

    def __init__(self, job: Job, events: Events, file: PositionFile, stop: threading.Event) -> None:
        """Read from where the position is; raises ConfigError when the run's events are not those it counts."""
        self._job = job
        self._events = events
        self._file = file
        self._stop = stop
        self._arrived: queue.SimpleQueue[tuple[int, RunEvent]] = queue.SimpleQueue()
        self._writer: TrackerWriter | None = None
        self._rows = RowFold(file.position.steps)
        self._is_finished = file.position.finished
        self._quiet_since = time.monotonic()
        self._resumed_at = file.position.event
        events.check(file.position.event)
        self._target = events.last()
        self._read_up_to = self._begin()
        events.follow(lambda number, fact: self._arrived.put((number, fact)), self._read_up_to)

    def _begin(self) -> int:
        """Return the event to read after; for a position, open the tracker and ask it."""
        position = self._file.position
        self._file.save()  # the key, before anything is written under it
        if position.event == 0:
            return 0
        held = self._open().last_event
        if held is not None and held < position.row:  # it lost rows, or was emptied: from the beginning, for the steps
            self._rows = RowFold()
            return 0
        return position.event

    def work(self) -> Written:
        done = Written()
        position = self._file.position
        while not self._stop.is_set():
            batch = self._next_batch()
            for event, fact in batch:
                row = self._rows.row(event, fact)
                if fact.kind == "state" and fact.source in _WHO_FINISHES:
                    with contextlib.suppress(UnreadableEvent):
                        self._is_finished = bool(read(StateFields, fact.data).finished)
                self._read_up_to = event
                if row is None:
                    continue
                writer = self._open()
                held = writer.last_event  # the event up to which the tracker held the rows when it was opened
                if event > (self._resumed_at if held is None else held):
                    writer.write(row)
                    done.num_rows += 1
                position.row = max(position.row, event)
            if batch and self._writer is not None:
                self._writer.flush()
                position.event = max(position.event, self._read_up_to)
                position.steps = dict(self._rows.steps)
                position.finished = self._is_finished
                self._file.save()
            if not batch and self._has_ended():
                done.finished = self._is_finished
                break
        done.num_repeated = self._rows.num_repeated
        if self._writer is not None:
            if done.finished:
                self._store_results(self._writer)
            self._writer.close(finished=done.finished)
        return done

    def _open(self) -> TrackerWriter:
        if self._writer is None:
            place = replace(self._job.destination, key=self._file.position.key, config=self._settings())
            self._writer = self._job.open(place)
        return self._writer

    def _next_batch(self) -> list[tuple[int, RunEvent]]:
        batch: list[tuple[int, RunEvent]] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._arrived.get(timeout=_WAIT_S))
            self._quiet_since = time.monotonic()
            while len(batch) < _BATCH:
                batch.append(self._arrived.get_nowait())
        return batch

    def _has_ended(self) -> bool:
        """Return True if everything is written that will come: all of the stream, or what arrives of it.

        The last messages may be unreadable or deleted, and the servers of a local run end with it.
        """
        if not (self._is_finished or self._job.once):
            return False
        if time.monotonic() - self._quiet_since > _QUIET_S:
            return True
        with contextlib.suppress(PenstockError):
            self._target = self._events.last()
        return self._read_up_to >= self._target

    def _settings(self) -> dict[str, Any]:
        try:
            document = json.loads(read_regular(self._job.folder / "config.json", _MOST_CONFIG_BYTES))
            return {
                f"{section}.{key}": hide((section, key), value)
                for section, values in document["settings"].items()
                for key, value in dict(values).items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _store_results(self, writer: TrackerWriter) -> None:
        """Write samples and report once for each end of the run; what cannot be read is logged and left out."""
        position = self._file.position
        end = max(self._rows.steps.values(), default=0)
        if self._job.read_samples is not None and f"samples {end}" not in position.stored:
            try:
                step, rows = self._job.read_samples()
            except PenstockError as err:
                log.warning("no table of samples", error=str(err))
            else:
                writer.table("samples", step, SAMPLE_COLUMNS, rows)
                position.stored.append(f"samples {end}")
        self._job.on_read()
        if f"report {end}" not in position.stored:
            files = self._report_files()
            for path in files:
                writer.file(path)
            position.stored += [f"report {end}"] if files else []
        writer.flush()
        self._file.save()

    def _report_files(self) -> list[Path]:
        give_up = time.monotonic() + (_REPORT_S if self._job.awaits_report else 0.0)
        started = time.time()
        while True:
            files = report_files(self._job.folder)
            is_new = files and (not self._job.awaits_report or files[0].stat().st_mtime >= started - 1.0)
            if is_new or time.monotonic() > give_up or self._stop.is_set():
                return files
            time.sleep(_WAIT_S)
