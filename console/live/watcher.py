"""Feed a `RunView` from NATS: tail the streams, read heartbeats and queue depths once a second, or less often.

A watcher acknowledges nothing: any number may watch a run without affecting it. While NATS is unreachable
the view shows it; watching continues when the connection is back.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.console.live.run_snapshot import QueueDepths
from penstock.console.live.run_view import RunView
from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusError, WireError
from penstock.protocol.facts import (
    DeadLetter,
    Fact,
    Heartbeat,
    RunEvent,
    WeightsApplied,
    WeightsPublished,
    WeightsRefused,
    decode,
)
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.protocol.transport.loop_thread import Pending

_MAX_UNREADABLE = 1000  # services
_READ_S = 20.0


@dataclass(frozen=True, slots=True)
class _Unreadable:
    what: str
    problem: str


class Watcher:
    """Watches one run over one bus; used by one thread, while facts arrive on the bus's thread."""

    def __init__(
        self,
        bus: Bus,
        view: RunView,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float = 1.0,
        gather_s: float = 0.0,
    ) -> None:
        """Tail the run from its beginning; raises MissingStream when it was never bootstrapped.

        Heartbeats and queue depths are read every ``period_s``; ``gather_s`` is that of `Bus.tail`.
        """
        self.view = view
        self._bus = bus
        self._clock = clock
        self._period_s, self._gather_s = period_s, gather_s
        self._arrived: queue.SimpleQueue[Fact | _Unreadable] = queue.SimpleQueue()
        self._unreadable_keys: set[str] = set()  # of heartbeats
        self._num_arrived: dict[str, int] = {}
        self._polled_at = 0.0
        self._heartbeats: Pending[list[Entry]] | None = None
        self._depths: dict[str, list[Pending[Any]]] = {}
        run = view.run_id
        self._tail(f"{run}-events", subjects.events(run), RunEvent)
        self._tail(f"{run}-weights", subjects.weights_published(run), WeightsPublished)
        self._tail(f"{run}-weights", subjects.weights_applied(run), WeightsApplied)
        self._tail(f"{run}-weights", subjects.weights_refused(run), WeightsRefused)
        self._tail(f"{run}-dead", subjects.dead(run), DeadLetter)
        self._live: KeyValue = bus.key_value(streams.live_bucket(run).bucket).wait()

    def step(self) -> None:
        """Fold what has arrived and send the next requests; never waits."""
        now = self._clock()
        self.view.fold_connection(self._bus.down_s, now)
        self._fold_arrived(now)
        if self._heartbeats is not None and self._heartbeats.done():
            self._fold_heartbeats(now)
        if self._depths and all(p.done() for pair in self._depths.values() for p in pair):
            self._fold_depths()
        is_due = now - self._polled_at >= self._period_s
        if is_due and self._heartbeats is None and not self._depths and not self._bus.down_s:
            self._polled_at = now
            self._heartbeats = self._live.entries()
            for spec in streams.consumers(self.view.run_id):
                self._depths.setdefault(spec.stage, []).append(self._bus.consumer_state(spec))

    def catch_up(self, deadline_s: float = 5.0) -> None:
        """Fold everything the streams hold now and the last heartbeats; stops without an error at the deadline.

        Called at the end of a run, so that the summary includes every message sent.
        """
        give_up = time.monotonic() + deadline_s
        try:
            held = {name: self._bus.stream_state(name).wait().num_messages for name in self._num_arrived}
            entries = self._live.entries().wait()
        except BusError:
            return
        while any(self._num_arrived[name] < count for name, count in held.items()):
            if time.monotonic() > give_up:
                break
            time.sleep(0.02)
        now = self._clock()
        self._fold_arrived(now)
        self.view.fold_heartbeats(self._decoded(entries, now), now)

    def _tail(self, stream: str, subject: str, fact: type[Any]) -> None:
        self._num_arrived.setdefault(stream, 0)

        def arrived(received: Fact | _Unreadable) -> None:
            self._arrived.put(received)
            self._num_arrived[stream] += 1

        def unreadable(err: WireError) -> None:
            arrived(_Unreadable(fact.schema_tag.partition(".")[0].replace("_", " "), str(err)))

        self._bus.tail(
            stream, subject, fact, arrived, from_start=True, on_unreadable=unreadable, gather_s=self._gather_s
        ).wait()

    def _fold_arrived(self, now: float) -> None:
        while True:
            try:
                fact = self._arrived.get_nowait()
            except queue.Empty:
                return
            match fact:
                case RunEvent():
                    self.view.fold_event(fact)
                case WeightsPublished():
                    self.view.fold_published(fact)
                case WeightsApplied():
                    self.view.fold_applied(fact)
                case WeightsRefused():
                    self.view.fold_refused(fact, now)
                case DeadLetter():
                    self.view.fold_dead_letter(fact, now)
                case _Unreadable(what, problem):
                    self.view.unreadable(now, what, problem)

    def _fold_heartbeats(self, now: float) -> None:
        pending, self._heartbeats = self._heartbeats, None
        try:
            entries = pending.wait() if pending else []
        except BusError:
            return  # the next attempt is a second later; disconnected_s shows the reason
        self.view.fold_heartbeats(self._decoded(entries, now), now)

    def _fold_depths(self) -> None:
        pending, self._depths = self._depths, {}
        try:
            states = {stage: [p.wait() for p in pair] for stage, pair in pending.items()}
        except BusError:
            return
        self.view.fold_queues(
            QueueDepths(
                waiting={stage: sum(s.num_pending for s in pair) for stage, pair in states.items()},
                held={stage: sum(s.num_ack_pending for s in pair) for stage, pair in states.items()},
            )
        )

    def _decoded(self, entries: list[Entry], now: float) -> list[Heartbeat]:
        """Decode heartbeats; one that cannot be read is counted once for each service."""
        beats = []
        for entry in entries:
            try:
                beats.append(decode(entry.value, Heartbeat))
            except WireError as err:
                if entry.key not in self._unreadable_keys and len(self._unreadable_keys) < _MAX_UNREADABLE:
                    self._unreadable_keys.add(entry.key)
                    self.view.unreadable(now, "heartbeat", f"{err}, of {entry.key}")
        return beats


def read_run(bus: Bus, run: str) -> RunView:
    """Return what the streams of a run hold now; messages that cannot be read are counted on stderr. Raises MissingStream."""
    view = RunView(run)
    Watcher(bus, view).catch_up(_READ_S)
    for what, count in view.unreadable_messages.items():
        print(f"penstock: {count} messages cannot be read and are left out: {what}", file=sys.stderr)
    return view
