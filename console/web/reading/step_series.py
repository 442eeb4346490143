"""The figures of a run's steps as columns, and the same in as few points as a chart has room for; pure.

A chart of ten thousand steps has about a thousand pixels. Each point sent is a bucket of consecutive steps with the mean,
the smallest and the largest value, so that a single outlier stays visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.console.report import learning
from penstock.console.report.event_fields import number

MAX_POINTS = 2000
MAX_NAMES = 300  # figures of one run; a foreign trainer may log any
_MAX_NAME = 120  # characters
_BUCKETS = (1, 2, 5)  # times powers of ten: the edges stay where they are while the run grows
_NOT_A_FIGURE = {"step", "version", "at"}


def step_figures(data: Mapping[str, Any]) -> dict[str, float]:
    """Return every finite number of a step event by name: its own fields, those named in `report/learning.py`, and tokens/s."""
    own = {name: found for name, value in data.items() if (found := number(value)) is not None}
    figures = {name: value for name, value in own.items() if name not in _NOT_A_FIGURE and not name.startswith("_")}
    seconds = sum(own.get(name, 0.0) for name in ("wait_s", "step_s", "publish_s"))
    if "tokens_trained" in own and "step_s" in own and seconds > 0:
        figures.setdefault("tokens_per_s", own["tokens_trained"] / seconds)
    return {name[:_MAX_NAME]: value for name, value in (figures | learning.read(data)).items()}


class StepSeries:
    """One row a step, one column a figure. Not thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._steps = np.zeros(64, dtype=np.int64)
        self._at = np.zeros(64)
        self._columns: dict[str, np.ndarray] = {}
        self._num = 0
        self.num_left_out = 0  # figures beyond `MAX_NAMES`

    def __len__(self) -> int:
        return self._num

    @property
    def names(self) -> list[str]:
        """The figures that any step has, sorted."""
        return sorted(self._columns)

    @property
    def last_step(self) -> int | None:
        """The newest step."""
        return int(self._steps[self._num - 1]) if self._num else None

    def add(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Add a step; one that a resumed trainer takes again also removes those after it."""
        place = int(np.searchsorted(self._steps[: self._num], step))
        self._num = place
        self._put(place, step, at, figures)

    def fill(self, other: StepSeries) -> None:
        """Add the steps of another series that this one does not have."""
        for row in range(other._num):
            step = int(other._steps[row])
            place = int(np.searchsorted(self._steps[: self._num], step))
            if place < self._num and self._steps[place] == step:
                continue
            figures = {n: float(column[row]) for n, column in other._columns.items() if not np.isnan(column[row])}
            self._put(place, step, float(other._at[row]), figures)

    def _put(self, place: int, step: int, at: float, figures: Mapping[str, float]) -> None:
        self._insert(place)
        self._steps[place], self._at[place] = step, at
        for column in self._columns.values():
            column[place] = np.nan
        for name, value in figures.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_NAMES:
                    self.num_left_out += 1
                    continue
                column = self._columns[name] = np.full(len(self._steps), np.nan)
            column[place] = value

    def _insert(self, place: int) -> None:
        if self._num == len(self._steps):
            self._steps = np.concatenate([self._steps, np.zeros_like(self._steps)])
            self._at = np.concatenate([self._at, np.zeros_like(self._at)])
            self._columns = {n: np.concatenate([c, np.full(len(c), np.nan)]) for n, c in self._columns.items()}
        for column in (self._steps, self._at, *self._columns.values()):
            column[place + 1 : self._num + 1] = column[place : self._num].copy()
        self._num += 1

    def sampled(
        self, names: Iterable[str] | None = None, *, first: int = 0, last: int | None = None, points: int = 600
    ) -> dict[str, Any]:
        """Return the steps from ``first`` to ``last`` in at most ``points`` buckets, as the API sends them.

        ``figures`` has, for each name, the mean, smallest and largest value of each bucket, None where no step has one;
        ``bucket`` is the number of steps in one, and ``steps`` the last step of each.
        """
        start = int(np.searchsorted(self._steps[: self._num], first))
        end = self._num if last is None else int(np.searchsorted(self._steps[: self._num], last, side="right"))
        size = bucket_size(end - start, points)
        # Buckets are aligned to whole multiples, so that a further step changes only the last one.
        aligned = start - start % size
        edges = np.unique(np.clip(np.arange(aligned, max(end, aligned + 1), size), start, end))
        edges = edges[edges < end]
        wanted = self.names if names is None else [name for name in dict.fromkeys(names) if name in self._columns]
        ends = [*(edges[1:] - 1).tolist(), end - 1] if len(edges) else []
        return {
            "first": int(self._steps[start]) if end > start else None,
            "last": int(self._steps[end - 1]) if end > start else None,
            "num_steps": max(end - start, 0),
            "bucket": size,
            "steps": self._steps[ends].tolist() if ends else [],
            "at": [round(at, 3) for at in self._at[ends].tolist()] if ends else [],
            "figures": {name: _buckets(self._columns[name][start:end], edges - start) for name in wanted},
        }

    def latest(self, name: str) -> float | None:
        """Return the newest value of a figure."""
        column = self._columns.get(name)
        if column is None:
            return None
        known = np.flatnonzero(~np.isnan(column[: self._num]))
        return float(column[known[-1]]) if len(known) else None


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


def _buckets(values: np.ndarray, edges: np.ndarray) -> dict[str, list[float | None]]:
    if not len(edges):
        return {"mean": [], "min": [], "max": []}
    known = ~np.isnan(values)
    count = np.add.reduceat(known, edges)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduceat(np.where(known, values, 0.0), edges)
        mean = total / np.maximum(count, 1)
    least = np.minimum.reduceat(np.where(known, values, np.inf), edges)
    most = np.maximum.reduceat(np.where(known, values, -np.inf), edges)
    return {"mean": _finite(mean, count), "min": _finite(least, count), "max": _finite(most, count)}


def _finite(values: np.ndarray, count: np.ndarray) -> list[float | None]:
    usable = (count > 0) & np.isfinite(values)
    return [float(f"{value:.6g}") if ok else None for value, ok in zip(values.tolist(), usable.tolist(), strict=True)]


def histogram(values: Sequence[float], *, bins: int = 20) -> dict[str, list[float]]:
    """Return counts of values between equally spaced edges; of at most eight different values, the counts of each."""
    if not values:
        return {"edges": [], "counts": []}
    found, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    if len(found) <= 8 or max(-found[0], found[-1]) > 1e300:  # such a range has no width that a float can hold
        found, counts = found[:bins], counts[:bins]
        return {"edges": found.tolist(), "counts": counts.tolist()}
    counts, edges = np.histogram(values, bins=bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
