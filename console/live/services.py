"""Fold heartbeats into the services of a run: which are alive, how long each waits, and when they overlap; pure.

A heartbeat carries totals since its process started. A service that is restarted under the same name starts at zero, so the
last totals of each earlier process are added. Busy and idle seconds count only inside the *window*, from the first optimizer
step on: start-up does not count as waiting.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.console.live.run_snapshot import Incident, ServiceLine, ServiceTotals, WatchedTotals, service_name
from penstock.protocol import heartbeats
from penstock.protocol.facts import Heartbeat

# Totals that never decrease within one process; a decrease means a restart.
COUNTERS = frozenset({"tokens_generated", "groups_generated", "groups_scored", "groups_trained"})
_RATE_WINDOW_S = 8.0  # rates are means over this long: several optimizer steps of a small model
_RATE_PACKS = (
    3  # or longer, over this many increases: a worker counts tokens once for each pack, which may take a minute
)
_LONGEST_RATE_WINDOW_S = 300.0
UNREAD_AFTER_S = 4.0  # a reader that did not read for longer cannot tell who was silent
ROLES = ("rollout", "reward", "trainer")
_Key = tuple[str, str]  # role, service id


@dataclass(frozen=True, slots=True)
class Span:
    """What a service did between two of its heartbeats; seconds."""

    wall_s: float
    busy_s: float


@dataclass(slots=True)
class _Marks:
    busy_s: float = 0.0
    idle_s: float = 0.0


class ServiceHistory:
    def __init__(self, first: Heartbeat, seen_at: float, *, in_window: bool) -> None:
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
        """Continue after an earlier session; the service counts as stopped until its next heartbeat."""
        history = cls(totals.beat, totals.beat.at, in_window=False)
        history.alive = history.is_of_this_session = False
        history.has_exited = True
        history.num_starts = totals.num_starts
        history._earlier_cpu_s = totals.earlier_cpu_s
        history._earlier = dict(totals.earlier)
        history._restored = _Marks(totals.busy_s, totals.idle_s)
        history._earlier_busy_s, history._earlier_idle_s = totals.busy_s, totals.idle_s
        history._rates.clear()
        history._rates.append((totals.beat.at, history.count("tokens_generated")))
        return history

    def totals(self) -> ServiceTotals:
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
            self._earlier_busy_s, self._earlier_idle_s = self.busy_s, self.idle_s
            self._earlier_cpu_s += self.beat.cpu_s
            for name in COUNTERS:
                self._earlier[name] = self._earlier.get(name, 0.0) + self.beat.figures.get(name, 0.0)
            self._origin = _Marks()
            self.num_starts += 1
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
        return int(self._earlier.get(figure, 0.0) + self.beat.figures.get(figure, 0.0))

    @property
    def cpu_s(self) -> float:
        return self._earlier_cpu_s + self.beat.cpu_s

    @property
    def busy_s(self) -> float:
        return self._earlier_busy_s + max(self.beat.busy_s - self._origin.busy_s, 0.0)

    @property
    def idle_s(self) -> float:
        return self._earlier_idle_s + max(self.beat.idle_s - self._origin.idle_s, 0.0)

    @property
    def tokens_per_s(self) -> float:
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


class Services:
    """All services of one run, including those that have exited, and those of earlier sessions."""

    def __init__(self) -> None:
        self.both_working_s = 0.0
        self.slot_s = (0.0, 0.0)  # used, and there: sequences of all engines, times seconds
        self._services: dict[_Key, ServiceHistory] = {}
        self._polled_at: float | None = None
        self._window_open = False
        self._final_shares: dict[str, float] | None = None
        self._restored_until = float("-inf")  # steps up to then belong to earlier sessions

    def restore(self, totals: WatchedTotals) -> None:
        self.both_working_s = totals.both_working_s
        self.slot_s = totals.slot_s
        self._restored_until = totals.until
        for service in totals.services:
            self._services[service.beat.role, service.beat.service_id] = ServiceHistory.restore(service)

    def totals(self) -> tuple[ServiceTotals, ...]:
        return tuple(history.totals() for history in self._services.values())

    def fold(self, beats: Sequence[Heartbeat], now: float) -> list[Incident]:
        """Take all heartbeats of the live bucket; return incidents for services that were lost, came back or joined.

        ``now`` is the reader's clock: missing heartbeats are timed by it, so the clocks of two machines are never
        compared.
        """
        is_first = self._polled_at is None  # what is there already has not joined now
        self._skip_unread_time(now)
        incidents: list[Incident] = []
        spans: dict[_Key, Span | None] = {}
        for beat in beats:
            key = (beat.role, beat.service_id)
            history = self._services.get(key)
            if history is None:
                self._services[key] = ServiceHistory(beat, now, in_window=self._window_open)
                if self._window_open and not is_first and beat.role != "trainer":  # it takes the steps: it was there
                    incidents.append(Incident(now, f"{service_name(*key)} joined", "back"))
                continue
            num_starts, was_alive, was_known = history.num_starts, history.alive, history.is_of_this_session
            spans[key] = history.fold(beat, now)
            history.alive = was_alive or history.seen_at == now
            if history.seen_at == now:
                history.has_exited = beat.state == heartbeats.EXITED
            if history.has_exited:
                history.alive = False
                if was_alive and self._window_open and self._final_shares is None:
                    incidents.append(Incident(now, f"{service_name(*key)} was stopped", "note"))
                continue
            if not was_known:  # the run was resumed
                continue
            if history.num_starts > num_starts or (history.alive and not was_alive):
                incidents.append(Incident(now, f"{service_name(*key)} is back", "back"))
        incidents += self._find_lost({(b.role, b.service_id) for b in beats}, now)
        if self._window_open and self._final_shares is None:
            self._add_overlap(spans)
            self._add_slots(spans)
        return incidents

    def open_window(self, at: float) -> None:
        """Count busy and idle seconds from now on; reopens a closed window. Called at every optimizer step, made ``at``."""
        if at <= self._restored_until:
            return
        self._final_shares = None
        if self._window_open:
            return
        self._window_open = True
        for history in self._services.values():
            history.open_window()

    def close_window(self) -> None:
        """Freeze the idle shares: after the last step all services wait. Later calls change nothing."""
        if self._window_open and self._final_shares is None:
            self._final_shares = self.idle_shares()

    @property
    def tokens_per_s(self) -> float:
        return sum(history.tokens_per_s for history in self._services.values())

    @property
    def slots_used(self) -> float | None:
        """The share of the engines' slots in which a sequence was decoded; None where no engine says how many it has."""
        used_s, whole_s = self.slot_s
        return used_s / whole_s if whole_s > 0 else None

    def count(self, figure: str) -> int:
        return sum(history.count(figure) for history in self._services.values())

    def has(self, role: str) -> bool:
        return any(known == role for known, _ in self._services)

    def num_starts(self, role: str, service_id: str) -> int:
        """Return how often a service was started, as far as its heartbeats show."""
        history = self._services.get((role, service_id))
        return history.num_starts if history else 1

    def cpu_s_per_role(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for (role, _), history in self._services.items():
            total[role] = total.get(role, 0.0) + history.cpu_s
        return total

    def lines(self, now: float) -> tuple[ServiceLine, ...]:
        lines = []
        for (role, service_id), history in self._services.items():
            if not history.is_of_this_session and self._polled_at is not None:
                continue
            whole = history.busy_s + history.idle_s
            lines.append(
                ServiceLine(
                    role=role,
                    service_id=service_id,
                    state=history.beat.state,
                    alive=history.alive,
                    silent_s=max(now - history.seen_at, 0.0),
                    version=history.beat.version,
                    tokens_per_s=history.tokens_per_s,
                    idle_share=history.idle_s / whole if whole > 0 else None,
                    num_starts=history.num_starts,
                    has_exited=history.has_exited,
                )
            )
        return tuple(sorted(lines, key=lambda s: (ROLES.index(s.role), s.service_id)))

    def idle_shares(self) -> dict[str, float]:
        """Return each role's share of time spent waiting for others, over all its services."""
        if self._final_shares is not None:
            return self._final_shares
        shares = {}
        for role in ROLES:
            histories = [h for (r, _), h in self._services.items() if r == role]
            idle = sum(h.idle_s for h in histories)
            whole = idle + sum(h.busy_s for h in histories)
            if whole > 0:
                shares[role] = idle / whole
        return shares

    def _skip_unread_time(self, now: float) -> None:
        """Exclude time in which the reader could not read heartbeats (NATS unreachable) from every silence."""
        if self._polled_at is not None and now - self._polled_at > UNREAD_AFTER_S:
            for history in self._services.values():
                history.seen_at += now - self._polled_at
        self._polled_at = now

    def _find_lost(self, present: set[_Key], now: float) -> list[Incident]:
        incidents = []
        for key, history in self._services.items():
            if not history.alive:
                continue
            silent_s = now - history.seen_at
            lost_after_s = heartbeats.lost_after_s(history.beat)
            if key not in present and silent_s < lost_after_s:
                history.alive = False  # it deleted its key: a regular exit
                history.has_exited = True
            elif silent_s >= lost_after_s:
                history.alive = False
                if self._final_shares is None:  # after the last step services may exit
                    incidents.append(
                        Incident(now, f"{service_name(*key)} is lost: no heartbeat for {silent_s:.0f} s", "lost")
                    )
        return incidents

    def _add_overlap(self, spans: Mapping[_Key, Span | None]) -> None:
        """Add the least overlap of trainer and busiest worker: busy + busy − wall seconds."""
        shares: dict[str, float] = {}
        wall_s = 0.0
        for (role, _), span in spans.items():
            if span is None or span.wall_s <= 0:
                continue
            shares[role] = max(shares.get(role, 0.0), min(span.busy_s / span.wall_s, 1.0))
            if role == "trainer":
                wall_s = span.wall_s
        self.both_working_s += max(shares.get("trainer", 0.0) + shares.get("rollout", 0.0) - 1.0, 0.0) * wall_s

    def _add_slots(self, spans: Mapping[_Key, Span | None]) -> None:
        used_s, whole_s = self.slot_s
        for key, span in spans.items():
            figures = self._services[key].beat.figures
            if span is not None and (slots := figures.get("engine_slots", 0.0)) > 0:
                used_s += span.wall_s * min(slots, figures.get("engine_running", 0.0))
                whole_s += span.wall_s * slots
        self.slot_s = used_s, whole_s
