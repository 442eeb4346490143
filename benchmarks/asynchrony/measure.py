"""What a run did between two steps, from the traces of its engines and its trainer."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One mode."""

    mode: str
    workers: int
    tokens_per_s: float  # trained
    step_s: float  # from the end of one step to the end of the next
    trainer_idle: float  # share of the time
    rollout_idle: float  # share of the time in which an engine runs no sequence, mean over engines
    slots_used: float  # tokens generated, as a share of what full engines would have generated
    staleness: dict[int, float]  # share of the trained tokens by age in versions
    dropped: int  # groups, in the whole run
    trained: int  # groups, in the whole run
    ideal_tokens_per_s: float
    cpu_share: float  # of this machine's cores, by all processes of the run
    delays: dict[str, float]  # `Durations` of this run that are the machine's, not the job's, s
    lengths: Sequence[int] = field(repr=False, default=())  # of everything trained
    abandoned: tuple[int, int] = (
        0,
        0,
    )  # completions that were started and not kept, and their tokens, in the whole run

    @property
    def staleness_mean(self) -> float:
        return sum(age * share for age, share in self.staleness.items())


def read_steps(trace: Path) -> list[dict[str, Any]]:
    """Return the trainer's lines."""
    return [json.loads(line) for line in trace.read_text().splitlines()]


def engine_shares(folder: Path, since: float, until: float, full_tokens_per_s: float) -> tuple[float, float]:
    """Return the idle share and the share of the slots used, means over the engines, between two times."""
    idle, used = [], []
    for file in sorted(folder.glob("engine-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        clocks = [0.0, *(line[0] for line in lines)]
        totals = [(0.0, 0.0), *((line[1], line[2]) for line in lines)]
        (busy_0, tokens_0), (busy_1, tokens_1) = (_at(clocks, totals, moment) for moment in (since, until))
        idle.append(max(0.0, 1.0 - (busy_1 - busy_0) / (until - since)))
        used.append((tokens_1 - tokens_0) / (until - since) / full_tokens_per_s)
    return sum(idle) / len(idle), sum(used) / len(used)


def _at(clocks: Sequence[float], totals: Sequence[tuple[float, float]], moment: float) -> tuple[float, float]:
    """Return the totals at a moment: the engine worked up to each line; between lines far apart it was idle before the later."""
    after = bisect.bisect_left(clocks, moment)
    if after == len(clocks):
        return totals[-1]
    before = max(0, after - 1)
    busy = totals[after][0] - totals[before][0]
    begun = max(clocks[before], clocks[after] - busy)
    share = min(1.0, max(0.0, moment - begun) / max(1e-9, clocks[after] - begun))
    return (
        totals[before][0] + share * busy,
        totals[before][1] + share * (totals[after][1] - totals[before][1]),
    )


def staleness_shares(metrics: Path, first: int) -> dict[int, float]:
    """Return the share of tokens by age over the steps after ``first``, from the trainer's own figures."""
    tokens: dict[int, int] = {}
    for line in metrics.read_text().splitlines():
        event = json.loads(line)
        if event.get("step", 0) > first:
            for age, count in event.get("staleness_tokens", {}).items():
                tokens[int(age)] = tokens.get(int(age), 0) + count
    total = max(1, sum(tokens.values()))
    return {age: count / total for age, count in sorted(tokens.items())}


def group_counts(metrics: Path) -> tuple[int, int]:
    """Return the groups dropped and trained in the run so far."""
    newest = [line for line in metrics.read_text().splitlines() if '"groups"' in line][-1]
    groups = json.loads(newest)["groups"]
    return sum(groups["dropped"].values()), groups["trained"]


def delays(metrics: Path, worker_logs: Sequence[Path]) -> dict[str, float]:
    """Return what lay between a step and its version on the workers in this run, by the names of `Durations`; means in seconds.

    They are the machine's: on a busy one they are several times those of a quiet one, and a simulation without them is too hopeful.
    """
    steps = [event for event in map(json.loads, metrics.read_text().splitlines()) if event["kind"] == "step"]
    recorded = {event["version"] + 1: event["at"] for event in steps}
    applied = [
        (event["policy_version"], datetime.fromisoformat(event["timestamp"]).timestamp(), event["pause_s"])
        for log in worker_logs
        for event in map(json.loads, (line for line in log.read_text().splitlines() if line.startswith("{")))
        if event.get("event") == "weights applied"
    ]
    first: dict[int, float] = {}  # seconds until the first worker begins to load a version: others may still drain
    for version, at, pause_s in applied:
        if version in recorded:
            first[version] = min(first.get(version, math.inf), at - pause_s - recorded[version])
    return {
        "between_s": fmean(event["record_s"] + event["submit_s"] for event in steps),
        "publish_s": fmean(first.values()),
        "load_s": fmean(pause_s for version, _, pause_s in applied if version in recorded),
    }


def abandoned_counts(metrics: Path) -> tuple[int, int]:
    """Return the completions that were started and not kept in the run so far, and the tokens that were sampled for them."""
    newest = [line for line in metrics.read_text().splitlines() if '"groups"' in line][-1]
    groups = json.loads(newest)["groups"]
    return sum(groups["abandoned_completions"].values()), sum(groups["abandoned_tokens"].values())
