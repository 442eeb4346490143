"""All Prometheus metrics of all services (`metrics.toml`, for documentation and dashboards too) and a scrape's samples.

To add a metric, add a row there and a call of `Samples.add` in the service. A label whose values are not fixed is in
`OPEN_LABELS`: of those the first `MAX_VALUES` get separate series.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram", "summary"]
Service = Literal["trainer", "rollout", "reward"]

OPEN_LABELS = frozenset({"endpoint", "scorer", "part", "environment", "reason"})
MAX_VALUES = 100  # of an open label in one metric of one process; the others are summed up as `OTHER`
MAX_LABEL_LENGTH = 128
OTHER = "other"

REQUEST_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_BUCKETS = {
    "seconds": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0),
    "request": REQUEST_BUCKETS,
    "version": (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0),
}
Labels = tuple[str, ...]  # values, in the order of the metric's labels


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    unit: str  # as people read it
    labels: tuple[str, ...]
    services: tuple[Service, ...]
    help: str
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds without infinity


def _read() -> Iterator[Metric]:
    for table in tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))["metrics"]:
        for name, kind, unit, labels, text, *buckets in table["rows"]:
            bounds = _BUCKETS[buckets[0]] if buckets else ()
            yield Metric(name, kind, unit, tuple(labels.split()), tuple(table["services"]), text, bounds)


METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _read()})


class Histogram:
    """Counts observations by bucket. Not thread-safe: the owner locks, or reads and writes in one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are the upper bounds in ascending order, without infinity."""
        self.bounds = tuple(bounds)
        self.total = 0.0  # of all observed values
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))

    def add(self, other: Histogram) -> None:
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total


_KINDS_OF_VALUES: Mapping[type, tuple[Kind, ...]] = MappingProxyType({Histogram: ("histogram",), dict: ("summary",)})


class LabelValues:
    """The values that open labels have had in this process: the first ones of each keep their series."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], set[str]] = {}

    def bounded(self, metric: Metric, label: str, value: str) -> str:
        """Return a value as it may be shown: at most `MAX_LABEL_LENGTH` characters of valid Unicode, or `OTHER`."""
        text = value[:MAX_LABEL_LENGTH].encode("utf-8", "replace").decode()
        if label not in OPEN_LABELS or not text:
            return text
        seen = self._seen.setdefault((metric.name, label), set())
        if text not in seen:
            if len(seen) >= MAX_VALUES:
                return OTHER
            seen.add(text)
        return text


class Samples:
    def __init__(self, service: Service, values: LabelValues) -> None:
        self._service = service
        self._values = values
        self.series: dict[str, dict[Labels, Any]] = {}  # of each metric its values, of the type that `add` takes

    def add(self, name: str, value: float | Histogram | Mapping[str, float], **labels: str) -> None:
        """Add a sample: the number of a counter or gauge, a histogram, or a summary.

        A summary is its values by quantile, and its ``sum`` and ``count`` where they are known. Values of one series
        are added up. Raises ValueError for a metric, labels or a kind of value that the table does not have.
        """
        metric = METRICS.get(name)
        kinds = _KINDS_OF_VALUES.get(type(value), ("counter", "gauge"))
        if metric is None or self._service not in metric.services or metric.kind not in kinds:
            raise ValueError(f"the {self._service} service has no {' or '.join(kinds)} {name}; add it to metrics.toml")
        if set(labels) != set(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, got {tuple(labels)}")
        shown = tuple(self._values.bounded(metric, label, labels[label]) for label in metric.labels)
        series = self.series.setdefault(name, {})
        if isinstance(value, Histogram):
            series.setdefault(shown, Histogram(value.bounds)).add(value)
        elif metric.kind == "counter":
            series[shown] = series.get(shown, 0.0) + value
        elif not any(text == OTHER for label, text in zip(metric.labels, shown, strict=True) if label in OPEN_LABELS):
            series[shown] = value  # a sum of gauges or summaries would have no meaning
