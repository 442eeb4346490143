"""The kills of a chaos run: which process and when, what was observed, the duration of each outage, and the tables.

A kill is due when the run has reached a step, after a further delay. Several may be due at the same step: then one service is
killed while another is still restarting. Between them the trainer kills itself at each of its crash points in turn
(`trainer/crash_points.py`). The plan is the same for the same seed.

| victim        | is productive again when                                            |
|---------------|---------------------------------------------------------------------|
| trainer       | it has made an optimizer step                                        |
| a worker      | its new process has announced a group                                |
| reward        | its new process has announced rewards                                |
| endpoint      | the reward service has announced rewards (it gives all of them)      |
| nats, S3      | a worker has announced a group, which needs both servers             |
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.deploy.local_run import REWARD, TRAINER, LocalRun
from penstock.deploy.processes.child import DeployError
from penstock.deploy.processes.supervise import ProcessEvent
from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusError
from penstock.protocol.facts import Heartbeat, RunEvent, decode
from penstock.protocol.transport.bus import Bus
from penstock.trainer.crash_points import CrashPoint

# Not passed: every step changes every word of this float32 model, so no anchor is ever stored in addition to a patch; a step is
# one optimizer step, and no checkpoint is in the object store.
_NOT_PASSED = (
    CrashPoint.ANCHOR_STORED, CrashPoint.UPDATED, CrashPoint.COPIED, CrashPoint.REMOVING, CrashPoint.FETCHED,
)  # fmt: skip
POINTS = tuple(point for point in CrashPoint if point not in _NOT_PASSED)
LAST_STEPS = 5  # too late for a kill: the groups of these steps may all be issued and scored already
LONGEST_DELAY_S = 2.0

# The first version that a process publishes passes these points before any training; the second pass is during training.
_PASSED_AT_THE_START = {
    CrashPoint.OBJECT_STORED, CrashPoint.SHARDS_STORED, CrashPoint.MANIFEST_STORED, CrashPoint.HEAD_MOVED, CrashPoint.ANNOUNCED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """A SIGKILL of ``victim``, ``delay_s`` after the run's step ``step``."""

    step: int
    delay_s: float
    victim: str


def plan_kills(
    seed: int, victims: Sequence[str], *, num_kills: int, steps: int, longest_delay_s: float = LONGEST_DELAY_S
) -> list[PlannedKill]:
    """Return kills in order of their steps: every victim equally often (the remainder drawn at random), at random moments."""
    rng = random.Random(f"kills {seed}")
    chosen = [victim for _ in range(num_kills // len(victims)) for victim in victims]
    chosen += rng.sample(list(victims), num_kills - len(chosen))
    rng.shuffle(chosen)
    moments = sorted(rng.randint(1, steps - LAST_STEPS) for _ in chosen)
    return [
        PlannedKill(step, rng.uniform(0.0, longest_delay_s), victim)
        for step, victim in zip(moments, chosen, strict=True)
    ]


def plan_points(seed: int, num_points: int) -> list[tuple[CrashPoint, int]]:
    """Return crash points in a random order, each with how often a process passes it before it kills."""
    rng = random.Random(f"points {seed}")
    points = rng.sample(POINTS, num_points)
    return [(point, 2 if point in _PASSED_AT_THE_START else 1) for point in points]


_POLL_S = 0.25
_ALIVE_DEADLINE_S = 60.0
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
    steps: list[tuple[float, int]] = field(default_factory=list)  # Unix time, number
    work: list[Work] = field(default_factory=list)  # one entry for each growth
    num_redelivered: int = 0  # groups that were delivered to a worker again

    @property
    def newest_step(self) -> int:
        """The highest step of the run so far; a crash may roll it back."""
        return max((step for _, step in self.steps), default=0)

    def productive_at(self, victim: str, restarted_at: float) -> float | None:
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
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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


def carry_out(
    planned: Sequence[PlannedKill], run: LocalRun, seen: Seen, kill: Callable[[LocalRun, str], None], deadline_s: float
) -> int:
    """Kill as planned until the trainer ends by itself; return how many of the kills came before that.

    ``kill`` gets the run and a victim that is alive, if it is a process of the run. Raises DeployError at the deadline, and for
    another end of the trainer than exit code 0.
    """
    give_up = time.monotonic() + deadline_s
    code, num_made = None, 0
    for planned_kill in planned:
        victim = planned_kill.victim

        def is_due(step: int = planned_kill.step) -> bool:
            return seen.newest_step >= step

        def is_alive(victim: str = victim) -> bool:
            return all(child.alive for child in run.processes() if child.name == victim)

        if (code := _wait(run, is_due, give_up)) is not None:
            break
        time.sleep(planned_kill.delay_s)
        if (code := _wait(run, is_alive, min(give_up, time.monotonic() + _ALIVE_DEADLINE_S))) is not None:
            break
        kill(run, victim)
        num_made += 1
    if code is None:
        code = _wait(run, lambda: False, give_up)
    if code:
        raise DeployError(f"the trainer ended with exit code {code}:\n{run.log_tail(TRAINER)}")
    return num_made


def _wait(run: LocalRun, condition: Callable[[], bool], give_up: float) -> int | None:
    """Wait for a condition; return the trainer's exit code if it ends first. Raises DeployError at the time ``give_up``."""
    while not condition():
        if (code := run.wait(0.02)) is not None:
            return code
        if time.monotonic() > give_up:
            raise DeployError(f"waited in vain; the trainer's log ends with\n{run.log_tail(TRAINER)}")
    return None


DETECTED_WITHIN_S = 10.0
PRODUCTIVE_WITHIN_S = 60.0


@dataclass(slots=True)
class Kill:
    """One SIGKILL and what followed; times in seconds, None if not measured."""

    victim: str
    cause: str  # "random", or the trainer's crash point
    at: float  # Unix time; of a crash point: when the supervisor noticed
    step: int  # of the run at that time
    detected_s: float | None = None  # until the supervisor reported it
    silence_noticed_s: float | None = None  # until missing heartbeats were reported, if the outage lasted that long
    restarted_s: float | None = None  # until the process was started again
    productive_s: float | None = None  # from the restart until it worked again; None: the run ended first
    is_disturbed: bool = False  # it, or the trainer that issues all work, was killed again before that


@dataclass(slots=True)
class Outcome:
    seed: int
    steps: int
    kills: list[Kill] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    issued_again: int = 0  # groups with a second attempt
    num_redelivered: int = 0  # groups redelivered to a worker after the worker that held them was killed
    account: dict[str, Any] = field(default_factory=dict)
    replay: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # conditions that do not hold
    late: list[str] = field(default_factory=list)  # detections and recoveries that took too long

    def by_victim(self) -> Counter[str]:
        """Return the number of kills of each victim, crash points separately."""
        return Counter(kill.victim if kill.cause == "random" else "trainer, at a point" for kill in self.kills)


def measure(kills: Sequence[Kill], events: Sequence[ProcessEvent], seen: Seen) -> None:
    """Set when each kill was detected, the process restarted and productive again, from events of supervisor and run."""
    for kill in kills:
        later = [event for event in events if event.name == kill.victim and event.at >= kill.at]
        crashed_at = next((event.at for event in later if event.kind == "crashed"), None)
        restarted = next((event.at for event in later if event.kind == "restarted"), None)
        if crashed_at is not None and kill.cause == "random":
            kill.detected_s = round(crashed_at - kill.at, 3)
        if restarted is not None:
            kill.restarted_s = round(restarted - kill.at, 3)
            productive = seen.productive_at(kill.victim, restarted)
            if productive is not None:
                kill.productive_s = round(productive - restarted, 2)
                kill.is_disturbed = any(
                    kill.at < other.at < productive and other.victim in {kill.victim, TRAINER} for other in kills
                )


def notice_silence(kills: Sequence[Kill], lost: Sequence[tuple[float, str]]) -> None:
    """Set when missing heartbeats were first reported after each kill."""
    for at, text in lost:
        before = [kill for kill in kills if text.startswith(f"{kill.victim} ") and kill.at < at]
        if before and before[-1].silence_noticed_s is None:
            before[-1].silence_noticed_s = round(at - before[-1].at, 2)


def late_ones(kills: Sequence[Kill]) -> list[str]:
    noticed = max((kill.detected_s for kill in kills if kill.detected_s is not None), default=0.0)
    undisturbed = [kill.productive_s for kill in kills if not kill.is_disturbed]
    productive = max((seconds for seconds in undisturbed if seconds is not None), default=0.0)
    late = []
    if noticed >= DETECTED_WITHIN_S:
        late.append(f"a killed process was detected only after {noticed:.1f} s")
    if productive >= PRODUCTIVE_WITHIN_S:
        late.append(f"a victim was productive only {productive:.1f} s after its restart")
    return late


def show(outcome: Outcome) -> str:
    """Return one run as rows of Markdown tables."""
    rows = [
        "| victim | kills | detected s | heartbeats missed s | restarted s | productive s (median, max) |",
        "|---|---|---|---|---|---|",
    ]
    for victim, count in sorted(outcome.by_victim().items()):
        kills = [k for k in outcome.kills if victim == (k.victim if k.cause == "random" else "trainer, at a point")]
        rows.append(
            f"| {victim} | {count} | {_worst(k.detected_s for k in kills)} | {_worst(k.silence_noticed_s for k in kills)} "
            f"| {_worst(k.restarted_s for k in kills)} | {_median(k.productive_s for k in kills)}, "
            f"{_worst(k.productive_s for k in kills)} |"
        )
    train = outcome.account["splits"][0]
    dropped = ", ".join(f"{n} {reason}" for reason, n in train["dropped"].items()) or "none"
    rows += [
        "",
        f"seed {outcome.seed}: {outcome.steps} steps, {len(outcome.kills)} kills, {outcome.wall_s:.0f} s of wall time, "
        f"{outcome.cpu_s:.0f} CPU s; {train['issued']} groups issued, {train['used']} trained, dropped: {dropped}, "
        f"dead letters {train['dead']}, in flight {sum(train['in_flight'].values())}; {outcome.issued_again} issued again, {outcome.num_redelivered} redelivered to a worker; "
        f"replay: {len(outcome.replay.get('same', []))} versions the same",
        "; ".join(["FAILS", *outcome.failures[:5]] if outcome.failures else ["holds", *outcome.late]),
    ]
    return "\n".join(rows)


def _worst(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{max(found):.2f}" if found else "–"


def _median(values: Iterable[float | None]) -> str:
    found = sorted(value for value in values if value is not None)
    return f"{found[len(found) // 2]:.2f}" if found else "–"
