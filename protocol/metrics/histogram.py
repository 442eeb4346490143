"""A histogram's counts, as Prometheus wants them: by upper bound, with their sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts observations by bucket. Not thread-safe: the owner locks, or reads and writes in one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are the upper bounds in ascending order, without infinity."""
        self.bounds = tuple(bounds)
        self.total = 0.0  # of all observed values
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return how many observations are at most each bound, the last for infinity."""
        return list(zip((*self.bounds, float("inf")), accumulate(self._counts), strict=True))

    def add(self, other: Histogram) -> None:
        """Add the counts of a histogram with the same bounds."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    def copy(self) -> Histogram:
        """Return an independent copy."""
        copied = Histogram(self.bounds)
        copied.add(self)
        return copied
