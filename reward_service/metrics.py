"""Counters of this replica: groups, errors, dead letters, and durations."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from penstock.protocol.groups import ScoredGroup
from penstock.protocol.metrics.table import REQUEST_BUCKETS, Histogram

WINDOW = 512  # most recent durations kept; enough for a p99, few enough to sort at every read


class Timings:
    def __init__(self) -> None:
        self.num_calls = 0
        self.num_failed = 0
        self.total_s = 0.0
        self.by_outcome = {"ok": Histogram(REQUEST_BUCKETS), "failed": Histogram(REQUEST_BUCKETS)}
        self._recent_s: deque[float] = deque(maxlen=WINDOW)

    def record(self, seconds: float, *, failed: bool) -> None:
        self.num_calls += 1
        self.num_failed += failed
        self.total_s += seconds
        self._recent_s.append(seconds)
        self.by_outcome["failed" if failed else "ok"].observe(seconds)

    def quantile(self, q: float) -> float:
        ordered = sorted(self._recent_s)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class ServiceMetrics:
    def __init__(self) -> None:
        self.packs = Timings()
        self.scored: Counter[str] = Counter()  # groups by scorer
        self.completions = 0
        self.dead: Counter[str] = Counter()  # groups by reason
        self.waited: Counter[str] = Counter()  # requeued groups, by reason
        self.num_errors = 0  # packs requeued because NATS or S3 was unreachable
        self.queue = 0  # packs waiting at the broker, as of the last heartbeat

    def groups_scored(self, groups: Iterable[ScoredGroup]) -> None:
        for group in groups:
            self.scored[group.scorer] += 1
            self.completions += len(group.rewards)

    def as_dict(self) -> dict[str, float]:
        """Return the `figures` of a heartbeat; the keys are stored."""
        return {
            "groups_scored": float(self.scored.total()), "completions_scored": float(self.completions),
            "packs": float(self.packs.num_calls), "errors": float(self.packs.num_failed + self.num_errors),
            "groups_waited": float(self.waited.total()), "groups_dead": float(self.dead.total()),
            "queue": float(self.queue), "pack_ms_p50": 1000 * self.packs.quantile(0.5),
            "pack_ms_p99": 1000 * self.packs.quantile(0.99),
        }  # fmt: skip
