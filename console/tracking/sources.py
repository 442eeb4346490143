"""Where the events of a run are read, with numbers that rise: its stream, the metrics.jsonl of a training on given answers, or of evaluations."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.console.evaluation_results import EvaluationResult
from penstock.console.report import curves
from penstock.console.report.event_fields import number
from penstock.protocol import streams, subjects
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import RunEvent
from penstock.protocol.transport.bus import Bus

_POLL_S = 1.0
_MOST_STEPS = 2**50
_MOST_SECONDS = 1e11
_KINDS = ("step", "eval", "state")  # in the order in which those of one step are written


class Events(ABC):
    """The events of one run, each with a number above that of the one before."""

    @abstractmethod
    def last(self) -> int:
        """Return the number of the newest event, 0 for none. Raises PenstockError."""

    @abstractmethod
    def check(self, after: int) -> None:
        """Raise ConfigError if the events are others than those of which ``after`` were written before."""

    @abstractmethod
    def follow(self, put: Callable[[int, RunEvent], None], after: int) -> None:
        """Call ``put`` for every event above ``after``, those to come included, on another thread."""


class RunStream(Events):
    """The events of a run on NATS."""

    def __init__(self, bus: Bus, run_id: str) -> None:
        self._bus, self._run_id = bus, run_id
        self._stream = streams.stream_name(run_id, "events")

    def last(self) -> int:
        return self._bus.stream_state(self._stream).wait().last_sequence

    def check(self, after: int) -> None:
        if after > self.last():
            raise ConfigError(
                f"the events of run {self._run_id} were deleted and begin again, after {after} were written to this tracker; "
                "remove the folder trackers of the run to write them to a new run of the tracker"
            )

    def follow(self, put: Callable[[int, RunEvent], None], after: int) -> None:
        self._bus.follow(
            self._stream,
            subjects.events(self._run_id),
            RunEvent,
            lambda fact, sequence, _: put(sequence, fact),
            after=after,
        ).wait()


class TrainingLog(Events):
    """The lines of `penstock sft`, `dpo` or `rm`.

    A number follows from the step: one that is made again, after a kill cut the file, has the number that it had.
    """

    def __init__(self, folder: Path, run_id: str, stop: threading.Event) -> None:
        """Read ``folder``, such as runs/my-run/sft-training; following it ends once ``stop`` is set."""
        self._folder, self._run_id, self._stop = folder, run_id, stop

    def last(self) -> int:
        return max((number for number, _ in self._events()), default=0)

    def check(self, after: int) -> None:
        """Accept any: the file may be shorter than it was, see the class."""

    def follow(self, put: Callable[[int, RunEvent], None], after: int) -> None:
        threading.Thread(target=self._follow, args=(put, after), daemon=True, name="training-log").start()

    def _follow(self, put: Callable[[int, RunEvent], None], after: int) -> None:
        seen: tuple[tuple[int, int] | None, bool] | None = None
        while not self._stop.is_set():
            now = (curves.metrics_stamp(self._folder / "metrics.jsonl"), (self._folder / curves.RESULT).is_file())
            for order, event in self._events() if now != seen else ():
                if order > after:
                    put(order, event)
                    after = order
            seen = now
            self._stop.wait(_POLL_S)

    def _events(self) -> Iterator[tuple[int, RunEvent]]:
        is_finished = (self._folder / curves.RESULT).is_file()  # asked first: then all lines are there
        last, at = 0, time.time()
        for row in curves.rows(self._folder):
            kind, step, written_at = row.pop("kind", None), row.get("step"), number(row.pop("at", None))
            at = written_at if written_at is not None and 0.0 < written_at < _MOST_SECONDS else at
            if kind in _KINDS and isinstance(step, int) and 0 < step < _MOST_STEPS:
                yield self._event(last := step, kind, at, row)
        if is_finished:
            yield self._event(last, "state", at, {"state": "finished", "finished": True})

    def _event(self, step: int, kind: str, at: float, data: dict[str, Any]) -> tuple[int, RunEvent]:
        event = RunEvent(run_id=self._run_id, source="trainer", kind=kind, at=at, data=data)
        return len(_KINDS) * step + _KINDS.index(kind), event


class EvaluationLog(TrainingLog):
    """The results of `penstock eval`, in the order in which they were noted: each has a line, which stays."""

    def _events(self) -> Iterator[tuple[int, RunEvent]]:
        for order, row in enumerate(curves.rows(self._folder), start=1):
            at = number(row.pop("at", None)) or time.time()
            yield order, RunEvent(run_id=self._run_id, source="evaluation", kind=curves.METRICS, at=at, data=row)


def note_evaluation(folder: Path, result: EvaluationResult) -> None:
    """Add a line with the figures of a complete result to the log of evaluations beside its folder, unless it has one."""
    with (folder.parent / "metrics.jsonl").open("a+b") as file:
        file.seek(0)
        text = file.read()
        if any(row.get("evaluation") == result.evaluation_id for row in curves.rows(folder.parent)):
            return
        row = {"evaluation": result.evaluation_id, "step": result.version or 0, "at": result.finished_at}
        row["values"] = {name: value for name, value in _figures(result) if value is not None}
        start = b"\n" if text and not text.endswith(b"\n") else b""  # after a line that a kill cut
        file.write(start + json.dumps(row).encode() + b"\n")


def _figures(result: EvaluationResult) -> Iterator[tuple[str, float | None]]:
    """Yield the estimates of each source by name, such as ``eval/math500/pass@8``."""
    for one in result.sources:
        means = {"reward": one.reward, "accuracy": one.accuracy, f"maj@{result.k}": one.maj}
        for name, estimate in (means | {f"pass@{k}": estimate for k, estimate in one.pass_at.items()}).items():
            yield f"eval/{one.source}/{name}", estimate and estimate.value
        for name in ("completion_tokens_mean", "truncated_share"):
            yield f"eval/{one.source}/{name}", getattr(one, name)
