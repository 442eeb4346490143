"""What one service did over all its lives, folded from its heartbeats.

A heartbeat carries totals since its process started. A service that was killed and came back under
the same name starts again from nothing, so the last totals of every finished life are banked: what
a killed worker generated stays in the sums. Seconds busy and idle count inside the *window* only,
from the first optimizer step on, because start-up is nobody's waiting.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.protocol.facts import Heartbeat

# Totals that only grow within a life; anything else in a heartbeat may fall without meaning anything.
COUNTERS = frozenset({"tokens_generated", "groups_generated", "groups_scored", "groups_trained"})
_RATE_WINDOW_S = 8.0  # rates are means over this long: several optimizer steps of a small model


@dataclass(frozen=True, slots=True)
class Span:
    """What a service did between two of its heartbeats; seconds."""

    wall_s: float
    busy_s: float


@dataclass(slots=True)
class _Marks:
    """Totals at one moment of one life."""

    busy_s: float = 0.0
    idle_s: float = 0.0


class ServiceHistory:
    """All lives of one service id."""

    def __init__(self, first: Heartbeat, seen_at: float, *, in_window: bool) -> None:
        """Begin with the first heartbeat; ``seen_at`` is the reader's clock, in seconds."""
        self.beat = first
        self.seen_at = seen_at
        self.alive = True
        self.num_lives = 1
        self._banked_cpu_s = 0.0
        self._banked_busy_s = 0.0
        self._banked_idle_s = 0.0
        self._banked: dict[str, float] = {}
        self._origin = _Marks() if in_window else _Marks(first.busy_s, first.idle_s)
        self._rates: deque[tuple[float, float]] = deque([(first.at, self.count("tokens_generated"))])

    def fold(self, beat: Heartbeat, seen_at: float) -> Span | None:
        """Take the next heartbeat; returns what was done since the last, None across a restart or a repeat."""
        if beat.at == self.beat.at:
            return None
        span: Span | None = None
        if self._is_new_life(beat):
            self._bank()
        else:
            span = Span(max(beat.at - self.beat.at, 0.0), max(beat.busy_s - self.beat.busy_s, 0.0))
            if beat.busy_s < self.beat.busy_s or beat.idle_s < self.beat.idle_s:  # it restarted its clock, not itself
                self._origin = _Marks()
        self.beat = beat
        self.seen_at = seen_at
        self._rates.append((beat.at, self.count("tokens_generated")))
        while len(self._rates) > 2 and beat.at - self._rates[0][0] > _RATE_WINDOW_S:
            self._rates.popleft()
        return span

    def open_window(self) -> None:
        """Count busy and idle seconds from here on."""
        self._banked_busy_s = self._banked_idle_s = 0.0
        self._origin = _Marks(self.beat.busy_s, self.beat.idle_s)

    def count(self, figure: str) -> int:
        """Return a counter (``tokens_generated``, ``groups_scored``...) summed over all lives."""
        return int(self._banked.get(figure, 0.0) + self.beat.figures.get(figure, 0.0))

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all lives."""
        return self._banked_cpu_s + self.beat.cpu_s

    @property
    def busy_s(self) -> float:
        """Busy seconds inside the window."""
        return self._banked_busy_s + max(self.beat.busy_s - self._origin.busy_s, 0.0)

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for others inside the window."""
        return self._banked_idle_s + max(self.beat.idle_s - self._origin.idle_s, 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second over the last seconds; 0.0 for a dead or fresh service."""
        (first_at, first), (last_at, last) = self._rates[0], self._rates[-1]
        if not self.alive or last_at <= first_at:
            return 0.0
        return (last - first) / (last_at - first_at)

    def _is_new_life(self, beat: Heartbeat) -> bool:
        if beat.cpu_s < self.beat.cpu_s:
            return True
        return any(beat.figures.get(name, 0.0) < self.beat.figures.get(name, 0.0) for name in COUNTERS)

    def _bank(self) -> None:
        self._banked_busy_s, self._banked_idle_s = self.busy_s, self.idle_s
        self._banked_cpu_s += self.beat.cpu_s
        for name in COUNTERS:
            self._banked[name] = self._banked.get(name, 0.0) + self.beat.figures.get(name, 0.0)
        self._origin = _Marks()
        self.num_lives += 1
