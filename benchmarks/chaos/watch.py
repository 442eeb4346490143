"""Observe the events and heartbeats of the chaos run, and derive how long each victim was missing.

| victim        | is productive again when                                            |
|---------------|---------------------------------------------------------------------|
| trainer       | it has made an optimizer step                                        |
| a worker      | its new process has announced a group                                |
| reward        | its new process has announced rewards                                |
| endpoint      | the reward service has announced rewards (it gives all of them)      |
| nats, S3      | a worker has announced a group, which needs both servers             |
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from penstock.deploy.local_run import REWARD, TRAINER
from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusError
from penstock.protocol.facts import Heartbeat, RunEvent, decode
from penstock.protocol.transport.bus import Bus

_POLL_S = 0.25
_WORKER, _ENDPOINT = "worker-", "endpoint-"
_FIGURE = {"rollout": "groups_generated", "reward": "groups_scored"}


@dataclass(frozen=True, slots=True)
class Work:
    """A service announced groups: ``in_session`` of them since its process began, seen ``at`` (Unix time)."""

    at: float
    service: str
    in_session: float


@dataclass(slots=True)
class Seen:
    """Everything observed, in order."""

    steps: list[tuple[float, int]] = field(default_factory=list)  # Unix time, number
    work: list[Work] = field(default_factory=list)  # one entry for each growth
    num_redelivered: int = 0  # groups that were delivered to a worker again

    @property
    def newest_step(self) -> int:
        """The highest step of the run so far; a crash may roll it back."""
        return max((step for _, step in self.steps), default=0)

    def productive_at(self, victim: str, restarted_at: float) -> float | None:
        """Return when a victim was productive again; None if the run ended first."""
        if victim == TRAINER:
            return min((at for at, _ in self.steps if at > restarted_at), default=None)
        return min((work.at for work in self.work if work.at > restarted_at and _proves(victim, work)), default=None)


def _proves(victim: str, work: Work) -> bool:
    if victim.startswith(_WORKER):
        return work.service == victim
    if victim == REWARD or victim.startswith(_ENDPOINT):
        return work.service == REWARD
    return work.service.startswith(_WORKER)


class Observer:
    """Tail a run's events and read its heartbeats in a thread, and add them to ``seen``; use as a context manager."""

    def __init__(self, run_id: str, bus: Bus, *, own_clock: bool = False) -> None:
        """Prepare to observe a bootstrapped run; ``own_clock``: times are when it was seen, since the services' clocks jump."""
        self.seen = Seen()
        self._own_clock = own_clock
        self._bus = bus
        self._live = bus.key_value(streams.live_bucket(run_id).bucket).wait()
        bus.tail(f"{run_id}-events", subjects.events(run_id), RunEvent, self._take, from_start=True).wait()
        self._announced: dict[str, float] = defaultdict(float)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        """Start observing."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop observing."""
        self._ending.set()
        self._thread.join(30.0)

    def _take(self, event: RunEvent) -> None:
        if event.kind == "step":
            self.seen.steps.append((self._time_of(event.at), int(event.data["step"])))
        elif event.kind == "log" and " redelivered" in str(event.data.get("text")):
            self.seen.num_redelivered += int(str(event.data["text"]).split()[0])

    def _run(self) -> None:
        while not self._ending.wait(_POLL_S):
            try:
                beats = [decode(entry.value, Heartbeat) for entry in self._live.entries().wait()]
            except BusError:
                continue  # nats-server is among the victims
            for beat in beats:
                if beat.role in _FIGURE:
                    self._fold(beat)

    def _fold(self, beat: Heartbeat) -> None:
        announced = beat.figures.get(_FIGURE[beat.role], 0.0)
        if announced != self._announced[beat.service_id]:
            self._announced[beat.service_id] = announced
            if announced:  # a smaller number than before is from a new process
                service = beat.service_id if beat.role == "rollout" else REWARD
                self.seen.work.append(Work(self._time_of(beat.at), service, announced))

    def _time_of(self, at: float) -> float:
        return time.time() if self._own_clock else at
