"""The samples of one scrape, checked against the table, with a bounded number of series; and the histogram among them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from penstock.protocol.metrics.table import MAX_LABEL_LENGTH, MAX_VALUES, METRICS, OPEN_LABELS, OTHER, Metric, Service


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
        """Return how many observations are at most each bound, the last for infinity."""
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))

    def add(self, other: Histogram) -> None:
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    def copy(self) -> Histogram:
        copied = Histogram(self.bounds)
        copied.add(self)
        return copied


Labels = tuple[str, ...]  # values, in the order of the metric's labels


class LabelValues:
    """The values that open labels have had in this process: the first ones of each keep their series."""

    def __init__(self, most: int = MAX_VALUES) -> None:
        self._most = most
        self._seen: dict[tuple[str, str], set[str]] = {}

    def bounded(self, metric: Metric, label: str, value: str) -> str:
        """Return a value as it may be shown: at most `MAX_LABEL_LENGTH` characters of valid Unicode, or `OTHER`."""
        text = value[:MAX_LABEL_LENGTH].encode("utf-8", "replace").decode()
        if label not in OPEN_LABELS or not text:
            return text
        seen = self._seen.setdefault((metric.name, label), set())
        if text not in seen:
            if len(seen) >= self._most:
                return OTHER
            seen.add(text)
        return text


class Samples:
    def __init__(self, service: Service, values: LabelValues) -> None:
        self._service = service
        self._values = values
        self.numbers: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self.quantiles: dict[str, dict[Labels, Mapping[str, float]]] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add the value of a counter or gauge. Raises ValueError for a metric or labels that the table does not have."""
        metric, shown = self._checked(name, labels, ("counter", "gauge"))
        series = self.numbers.setdefault(name, {})
        if metric.kind == "counter":
            series[shown] = series.get(shown, 0.0) + value
        elif not self._is_other(metric, shown):  # a sum of gauges would have no meaning
            series[shown] = value

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        _, shown = self._checked(name, labels, ("histogram",))
        series = self.histograms.setdefault(name, {})
        if shown in series:
            series[shown].add(histogram)
        else:
            series[shown] = histogram.copy()

    def add_quantiles(self, name: str, quantiles: Mapping[str, float], **labels: str) -> None:
        """Add a summary: values by quantile, and its ``sum`` and ``count`` where they are known."""
        metric, shown = self._checked(name, labels, ("summary",))
        series = self.quantiles.setdefault(name, {})
        if not self._is_other(metric, shown):
            series[shown] = dict(quantiles)

    def _checked(self, name: str, labels: Mapping[str, str], kinds: tuple[str, ...]) -> tuple[Metric, Labels]:
        metric = METRICS.get(name)
        if metric is None or self._service not in metric.services or metric.kind not in kinds:
            raise ValueError(
                f"the {self._service} service has no {' or '.join(kinds)} {name}; add it to metrics/table.py"
            )
        if set(labels) != set(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, got {tuple(labels)}")
        return metric, tuple(self._values.bounded(metric, label, labels[label]) for label in metric.labels)

    @staticmethod
    def _is_other(metric: Metric, shown: Labels) -> bool:
        return any(value == OTHER for label, value in zip(metric.labels, shown, strict=True) if label in OPEN_LABELS)
