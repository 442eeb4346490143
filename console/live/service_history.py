"""The totals of one service over all its starts and all sessions of the run, folded from its heartbeats.

A heartbeat carries totals since its process started. A service that is restarted under the same name
starts at zero, so the last totals of each earlier process are added: what a killed worker generated
stays in the sums. Busy and idle seconds count only inside the *window*, from the first optimizer
step on, because start-up does not count as waiting.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from penstock.console.live.watched_totals import ServiceTotals
from penstock.protocol.facts import Heartbeat

# Totals that never decrease within one process; a decrease means a restart.
COUNTERS = frozenset({"tokens_generated", "groups_generated", "groups_scored", "groups_trained"})
_RATE_WINDOW_S = 8.0  # rates are means over this long: several optimizer steps of a small model
_RATE_PACKS = (
    3  # or longer, over this many increases: a worker counts tokens once for each pack, which may take a minute
)
_LONGEST_RATE_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Span:
    """What a service did between two of its heartbeats; seconds."""

    wall_s: float
    busy_s: float


@dataclass(slots=True)
class _Marks:
    """Totals of one process at one moment."""

    busy_s: float = 0.0
    idle_s: float = 0.0


class ServiceHistory:
    """All starts of one service id."""

    def __init__(self, first: Heartbeat, seen_at: float, *, in_window: bool) -> None:
        """Start with the first heartbeat; ``seen_at`` is the reader's clock, in seconds."""
        self.beat = first
        self.seen_at = seen_at
        self.alive = True
        self.has_exited = False  # regularly
        self.is_of_this_session = True  # False: known only from the totals of an earlier one
        self.num_starts = 1
        self._earlier_cpu_s = 0.0
        self._earlier_busy_s = 0.0
        self._earlier_idle_s = 0.0
        self._earlier: dict[str, float] = {}
        self._restored = _Marks()  # inside the windows of earlier sessions
        self._origin = _Marks() if in_window else _Marks(first.busy_s, first.idle_s)
        self._rates: deque[tuple[float, float]] = deque([(first.at, self.count("tokens_generated"))])

    @classmethod
    def restore(cls, totals: ServiceTotals) -> ServiceHistory:
        """Continue after an earlier session; the service is not alive until its next heartbeat."""
        history = cls(totals.beat, totals.beat.at, in_window=False)
        history.alive = history.is_of_this_session = False
        history.num_starts = totals.num_starts
        history._earlier_cpu_s = totals.earlier_cpu_s
        history._earlier = dict(totals.earlier)
        history._restored = _Marks(totals.busy_s, totals.idle_s)
        history._earlier_busy_s, history._earlier_idle_s = totals.busy_s, totals.idle_s
        history._rates.clear()
        history._rates.append((totals.beat.at, history.count("tokens_generated")))
        return history

    def totals(self) -> ServiceTotals:
        """Return what `restore` needs."""
        return ServiceTotals(
            beat=self.beat,
            num_starts=self.num_starts,
            earlier_cpu_s=self._earlier_cpu_s,
            earlier=self._earlier,
            busy_s=self.busy_s,
            idle_s=self.idle_s,
        )

    def fold(self, beat: Heartbeat, seen_at: float) -> Span | None:
        """Take the next heartbeat; returns what was done since the last, None across a restart or a repeat."""
        if beat.at == self.beat.at:
            return None
        span: Span | None = None
        if self._has_restarted(beat):
            self._add_earlier()
        else:
            span = Span(max(beat.at - self.beat.at, 0.0), max(beat.busy_s - self.beat.busy_s, 0.0))
            if (
                beat.busy_s < self.beat.busy_s or beat.idle_s < self.beat.idle_s
            ):  # it reset these totals without a restart
                self._origin = _Marks()
        self.beat = beat
        self.seen_at = seen_at
        self.is_of_this_session = True
        self._rates.append((beat.at, self.count("tokens_generated")))
        self._shorten_rates()
        return span

    def open_window(self) -> None:
        """Count busy and idle seconds from now on; those of earlier sessions remain."""
        self._earlier_busy_s, self._earlier_idle_s = self._restored.busy_s, self._restored.idle_s
        self._origin = _Marks(self.beat.busy_s, self.beat.idle_s)

    def count(self, figure: str) -> int:
        """Return a counter (``tokens_generated``, ``groups_scored``...) summed over all starts."""
        return int(self._earlier.get(figure, 0.0) + self.beat.figures.get(figure, 0.0))

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all starts."""
        return self._earlier_cpu_s + self.beat.cpu_s

    @property
    def busy_s(self) -> float:
        """Busy seconds inside the window."""
        return self._earlier_busy_s + max(self.beat.busy_s - self._origin.busy_s, 0.0)

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for others inside the window."""
        return self._earlier_idle_s + max(self.beat.idle_s - self._origin.idle_s, 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second over the last packs; 0.0 for a service that is lost or has just started."""
        (first_at, first), (last_at, last) = self._rates[0], self._rates[-1]
        if not self.alive or last_at <= first_at:
            return 0.0
        return (last - first) / (last_at - first_at)

    def _shorten_rates(self) -> None:
        """Drop points that are older than the window, as long as the others have enough increases."""
        while len(self._rates) > 2 and (age := self._rates[-1][0] - self._rates[0][0]) > _RATE_WINDOW_S:
            counts = [count for _, count in itertools.islice(self._rates, 1, None)]
            increases = sum(later > earlier for earlier, later in itertools.pairwise(counts))
            if increases < _RATE_PACKS and age <= _LONGEST_RATE_WINDOW_S:
                return
            self._rates.popleft()

    def _has_restarted(self, beat: Heartbeat) -> bool:
        if beat.cpu_s < self.beat.cpu_s:
            return True
        return any(beat.figures.get(name, 0.0) < self.beat.figures.get(name, 0.0) for name in COUNTERS)

    def _add_earlier(self) -> None:
        self._earlier_busy_s, self._earlier_idle_s = self.busy_s, self.idle_s
        self._earlier_cpu_s += self.beat.cpu_s
        for name in COUNTERS:
            self._earlier[name] = self._earlier.get(name, 0.0) + self.beat.figures.get(name, 0.0)
        self._origin = _Marks()
        self.num_starts += 1
