"""Observe the events and heartbeats of the chaos run, and derive how long each victim was missing.

| victim        | is productive again when                                            |
|---------------|---------------------------------------------------------------------|
| trainer       | it has made an optimizer step                                        |
| a worker      | its new process has announced a group                                |
| reward        | its new process has announced rewards                                |
| endpoint      | the reward service has announced rewards (all of them are its)       |
| nats, S3      | a worker has announced a group: a task came, a pack and a fact went  |
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from penstock.deploy.local_run import REWARD, TRAINER
from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusError
from penstock.protocol.facts import Heartbeat, RunEvent, decode
from penstock.protocol.transport.bus import Bus

_LOOK_S = 0.25
_WORKER, _ENDPOINT = "worker-", "endpoint-"
_FIGURE = {"rollout": "groups_generated", "reward": "groups_scored"}


@dataclass(frozen=True, slots=True)
class Work:
    """A service announced groups: ``in_life`` of them since its process began, seen ``at`` (Unix time)."""

    at: float
    service: str
    in_life: float


@dataclass(slots=True)
class Seen:
    """Everything observed, in order."""

    steps: list[tuple[float, int]] = field(default_factory=list)  # Unix time, number
    work: list[Work] = field(default_factory=list)  # one entry for each growth
    num_redelivered: int = 0  # groups that were delivered to a worker again

    @property
    def newest_step(self) -> int:
        """The highest step that was ever made; a crash may roll it back."""
        return max((step for _, step in self.steps), default=0)

    def productive_at(self, victim: str, restarted_at: float) -> float | None:
        """Return when a victim was productive again; None if the run ended first."""
        if victim == TRAINER:
            return min((at for at, _ in self.steps if at > restarted_at), default=None)
        return min((work.at for work in self.work if work.at > restarted_at and _shows(victim, work)), default=None)


def _shows(victim: str, work: Work) -> bool:
    if victim.startswith(_WORKER):
        return work.service == victim
    if victim == REWARD or victim.startswith(_ENDPOINT):
        return work.service == REWARD
    return work.service.startswith(_WORKER)


class Observer:
    """Tails a run's events and reads its heartbeats in a thread; use as a context manager. ``seen`` grows."""

    def __init__(self, run_id: str, bus: Bus) -> None:
        """Look at a run that is bootstrapped."""
        self.seen = Seen()
        self._bus = bus
        self._live = bus.key_value(streams.live_bucket(run_id).bucket).wait()
        bus.tail(f"{run_id}-events", subjects.events(run_id), RunEvent, self._take, from_start=True).wait()
        self._announced: dict[str, float] = defaultdict(float)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop looking."""
        self._ending.set()
        self._thread.join(30.0)

    def _take(self, event: RunEvent) -> None:
        if event.kind == "step":
            self.seen.steps.append((event.at, int(event.data["step"])))
        elif event.kind == "log" and " redelivered" in str(event.data.get("text")):
            self.seen.num_redelivered += int(str(event.data["text"]).split()[0])

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
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
                self.seen.work.append(Work(beat.at, beat.service_id if beat.role == "rollout" else REWARD, announced))
