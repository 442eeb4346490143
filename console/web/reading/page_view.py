"""Keep what the page needs of a run's messages beyond the panel's `RunView`: every metric of every step, versions, heartbeats; pure.

A chart of ten thousand steps has about a thousand pixels. Each point sent is a bucket of consecutive steps with the mean,
the smallest and the largest value, so that a single outlier stays visible. Buckets that are full do not change while the run
grows, so they are kept for the next request of all steps. Plain Python: numpy would cost every start of the console 0.1 s of CPU.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.console.live.run_snapshot import WatchedTotals
from penstock.console.live.run_view import RunView
from penstock.console.report import learning
from penstock.console.report.curves import METRICS
from penstock.console.report.event_fields import number
from penstock.console.report.learning import mean
from penstock.protocol.facts import Heartbeat, RunEvent, WeightsApplied, WeightsPublished, WeightsRefused

MAX_POINTS = 2000
MAX_NAMES = 300  # figures of one run; a foreign trainer may log any
_MAX_NAME = 120  # characters
_BUCKETS = (1, 2, 5)  # times powers of ten: the edges stay where they are while the run grows
_NOT_A_FIGURE = {"step", "version", "at"}
_MAX_VERSIONS = 20_000  # whose adoption is remembered
_MAX_SERVICES = 2000


def step_metrics(data: Mapping[str, Any]) -> dict[str, float]:
    """Return every finite number of a step event by name: its fields, those named in `report/learning.py`, and tokens/s."""
    fields = {name: finite for name, value in data.items() if (finite := number(value)) is not None}
    figures = {name: value for name, value in fields.items() if name not in _NOT_A_FIGURE and not name.startswith("_")}
    seconds = sum(fields.get(name, 0.0) for name in ("wait_s", "step_s", "publish_s"))
    if "tokens_trained" in fields and "step_s" in fields and seconds > 0:
        figures.setdefault("tokens_per_s", fields["tokens_trained"] / seconds)
    return {name[:_MAX_NAME]: value for name, value in (figures | learning.read(data)).items()}


class StepSeries:
    """One row a step, one column a figure. Not thread-safe."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._at = array("d")
        self._columns: dict[str, array[float]] = {}  # NaN where a step does not have the figure
        self._full: dict[str, _FullBuckets] = {}  # by figure

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    @property
    def last_step(self) -> int | None:
        return self._steps[-1] if self._steps else None

    def add(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Add a step; one that a resumed trainer takes again also removes those after it."""
        place = bisect_left(self._steps, step)
        if place < len(self):
            self._full.clear()
        if place == len(self) - 1 and self._steps[place] == step:  # a script logs one step in several calls
            known = {name: column[place] for name, column in self._columns.items() if not math.isnan(column[place])}
            figures = {**known, **figures}
        for column in (self._steps, self._at, *self._columns.values()):
            del column[place:]
        self._put(place, step, at, figures)

    def fill(self, other: StepSeries) -> None:
        """Add the steps of another series that this one does not have."""
        self._full.clear()
        for row, step in enumerate(other._steps):
            place = bisect_left(self._steps, step)
            if place < len(self) and self._steps[place] == step:
                continue
            figures = {name: column[row] for name, column in other._columns.items() if not math.isnan(column[row])}
            self._put(place, step, other._at[row], figures)

    def _put(self, place: int, step: int, at: float, figures: Mapping[str, float]) -> None:
        for name in figures:
            if name not in self._columns and len(self._columns) < MAX_NAMES:
                self._columns[name] = array("d", [math.nan]) * len(self)
        self._steps.insert(place, step)
        self._at.insert(place, at)
        for name, column in self._columns.items():
            column.insert(place, figures.get(name, math.nan))

    def sampled(
        self, names: Iterable[str] | None = None, *, first: int = 0, last: int | None = None, points: int = 600
    ) -> dict[str, Any]:
        """Return the steps from ``first`` to ``last`` in at most ``points`` buckets, as the API sends them.

        ``figures`` has, for each name, the mean, smallest and largest value of each bucket, None where no step has one;
        ``bucket`` is the number of steps in one, and ``steps`` the last step of each.
        """
        start = bisect_left(self._steps, first)
        end = len(self) if last is None else max(start, bisect_right(self._steps, last))
        size = bucket_size(end - start, points)
        # Buckets are aligned to whole multiples, so that a further step changes only the last one.
        edges = [start, *range(start - start % size + size, end, size), end] if end > start else []
        wanted = self.names if names is None else [name for name in dict.fromkeys(names) if name in self._columns]
        return {
            "first": self._steps[start] if edges else None,
            "last": self._steps[end - 1] if edges else None,
            "num_steps": end - start,
            "bucket": size,
            "steps": [self._steps[edge - 1] for edge in edges[1:]],
            "at": [round(self._at[edge - 1], 3) for edge in edges[1:]],
            "figures": {name: self._sampled(name, edges, size) for name in wanted},
        }

    def _sampled(self, name: str, edges: Sequence[int], size: int) -> dict[str, list[float | None]]:
        """Return the mean, least and greatest value of each bucket of a figure."""
        column = self._columns[name]
        if not edges or edges[0] > 0:
            return _transposed([_bucket(column[start:end]) for start, end in itertools.pairwise(edges)])
        full = self._full.get(name)
        if full is None or full.size != size:
            full = self._full[name] = _FullBuckets(size)
        end = edges[-1]
        num_full, num_left = divmod(end, size)
        full.extend(column, num_full)
        last = _transposed([_bucket(column[end - num_left : end])] if num_left else [])
        return {kind: values[:num_full] + last[kind] for kind, values in full.values.items()}

    def latest(self, name: str) -> float | None:
        column = self._columns.get(name)
        if column is None:
            return None
        return next((value for value in reversed(column) if not math.isnan(value)), None)


def bucket_size(num_steps: int, points: int) -> int:
    """Return the least of 1, 2, 5, 10, 20, … steps a bucket with which ``num_steps`` fit into ``points`` buckets."""
    points = max(2, min(points, MAX_POINTS))
    power = 1
    while True:
        for factor in _BUCKETS:
            # An aligned first bucket may be cut, which adds one.
            if num_steps <= (points - 1) * factor * power or (factor * power == 1 and num_steps <= points):
                return factor * power
        power *= 10


class _FullBuckets:
    def __init__(self, size: int) -> None:
        self.size = size
        self.values: dict[str, list[float | None]] = _transposed([])

    def extend(self, column: array[float], num: int) -> None:
        size = self.size
        more = [_bucket(column[at * size : (at + 1) * size]) for at in range(len(self.values["mean"]), num)]
        for kind, values in _transposed(more).items():
            self.values[kind].extend(values)


def _bucket(values: array[float]) -> tuple[float | None, float | None, float | None]:
    if len(values) == 1:
        only = _shown(values[0])
        return only, only, only
    known = [value for value in values if not math.isnan(value)]
    return (_shown(mean(known)), _shown(min(known)), _shown(max(known))) if known else (None, None, None)


def _transposed(buckets: list[tuple[float | None, float | None, float | None]]) -> dict[str, list[float | None]]:
    return {kind: [bucket[place] for bucket in buckets] for place, kind in enumerate(("mean", "min", "max"))}


def _shown(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def histogram(values: Sequence[float], *, bins: int = 20) -> dict[str, Sequence[float]]:
    """Return counts of values between equally spaced edges; of at most eight different values, the counts of each."""
    counts = Counter(values)
    distinct = sorted(counts)
    if not distinct:
        return {"edges": [], "counts": []}
    low, high = distinct[0], distinct[-1]
    if len(distinct) <= 8 or max(-low, high) > 1e300:  # such a range has no width that a float can hold
        return {"edges": distinct[:bins], "counts": [counts[value] for value in distinct[:bins]]}
    edges = [low + (high - low) * number / bins for number in range(bins)]
    inside = [0] * bins
    for value, count in counts.items():
        inside[bisect_right(edges, value) - 1] += count
    return {"edges": [*edges, high], "counts": inside}


@dataclass(slots=True)
class VersionNotes:
    step: int | None = None
    num_bytes: int = 0
    announced_at: float | None = None  # wall-clock seconds, by the trainer
    adopted: dict[str, WeightsApplied] = field(default_factory=dict)  # by worker
    refused: dict[str, str] = field(default_factory=dict)  # reason by worker


class PageView(RunView):
    """A `RunView` that also keeps what the page draws; one thread folds and reads."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.series = StepSeries()
        self.versions: dict[int, VersionNotes] = {}
        self.beats: dict[tuple[str, str], Heartbeat] = {}

    def restore(self, totals: WatchedTotals) -> None:
        super().restore(totals)
        self.beats = {(one.beat.role, one.beat.service_id): one.beat for one in totals.services}

    def add_recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of metrics.jsonl whose events are no longer on the stream."""
        kept = list(rows)
        super().add_recorded(kept)
        recorded = StepSeries()
        for row in kept:
            at = number(row.get("at"))
            if row.get("kind") == "step" and at is not None:
                _add_step(recorded, at, row)
                self._saw(at)
        self.series.fill(recorded)

    @property
    def last_at(self) -> float:
        """When the newest message was sent, in wall-clock seconds."""
        return self._last_at

    def fold_event(self, event: RunEvent) -> None:
        super().fold_event(event)
        if event.kind == "step":
            _add_step(self.series, event.at, event.data)
        elif event.kind == METRICS and isinstance(values := event.data.get("values"), dict):
            self._saw(event.at)
            _add_step(self.series, event.at, {**values, "step": event.data.get("step")})
        elif event.kind == "weights":
            version = event.data.get("version")
            if isinstance(version, int) and 0 <= version < 2**53:
                self._version(version).announced_at = event.at

    def fold_published(self, fact: WeightsPublished) -> None:
        super().fold_published(fact)
        notes = self._version(fact.version)
        notes.step, notes.num_bytes = fact.step, fact.num_bytes

    def fold_applied(self, fact: WeightsApplied) -> None:
        super().fold_applied(fact)
        self._version(fact.version).adopted[fact.worker_id] = fact

    def fold_refused(self, fact: WeightsRefused, now: float) -> None:
        super().fold_refused(fact, now)
        self._version(fact.version).refused[fact.worker_id] = fact.reason

    def fold_heartbeats(self, beats: Sequence[Heartbeat], now: float) -> None:
        super().fold_heartbeats(beats, now)
        for beat in beats[:_MAX_SERVICES]:
            self.beats[beat.role, beat.service_id] = beat

    def _version(self, version: int) -> VersionNotes:
        notes = self.versions.get(version)
        if notes is None:
            notes = self.versions[version] = VersionNotes()
            if len(self.versions) > _MAX_VERSIONS:
                del self.versions[min(self.versions)]
        return notes


def _add_step(series: StepSeries, at: float, data: Mapping[str, Any]) -> None:
    step = data.get("step")
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
        series.add(step, at, step_metrics(data))
