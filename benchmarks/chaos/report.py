"""The result of a chaos run: its kills, the duration of each outage, and the tables of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.watch import Seen

from penstock.deploy.local_run import TRAINER
from penstock.deploy.processes.supervise import ProcessEvent

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
    """The result of one run."""

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
    """Return the kills that were detected or recovered from too late."""
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
