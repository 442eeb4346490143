"""Measure where the time of a run went, by phase of a step and by service, from the files in its folder (`penstock profile`).

| what                | from                                                                                           |
|---------------------|------------------------------------------------------------------------------------------------|
| phases of a step    | the ``…_s`` fields of its line in `metrics.jsonl`; "other" is the rest of the time from step to step |
| before, after       | first and last time of `watched.json`, when a service first and last reported                      |
| working, waiting, CPU | the heartbeats in `watched.json`; working and waiting from the first step on, CPU from the start |
| parts of the CPU    | the newest process of each service: its threads by name, and the engine of a worker                |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from penstock.console.connections import NamedRun
from penstock.console.live import run_snapshot
from penstock.console.live.run_snapshot import ServiceTotals, WatchedTotals, service_name
from penstock.console.report import curves
from penstock.console.report.event_fields import number
from penstock.console.terminal import console, print_table
from penstock.console.tools.runs import existing_folder
from penstock.protocol.errors import ConfigError
from penstock.protocol.heartbeats import ENGINE_CPU, THREAD_CPU, apply_means

OTHER = "other"
# Phases of the training thread, one after the other: field of the step's line -> name.
_PHASES = {
    "wait_s": "wait for groups",
    "step_s": "train",
    "record_s": "record",
    "submit_s": "copy weights",
    "checkpoint_s": "checkpoint",
}
_ROLES = ("trainer", "rollout", "reward")
_SMALL = 0.05  # a share that is not worth a sentence
_CURES = {
    "checkpoint": "a larger trainer.checkpoint_every, or only trainer.checkpoint_every_s",
    "copy weights": "each version is copied before the next step; a larger batch has fewer versions",
    OTHER: "it is spent between the phases, as in reports and in starting evaluations",
}
_NUM_PARTS = 4  # of a service's CPU that are named in the table


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float
    share: float  # of the time from the first step to the last


@dataclass(frozen=True, slots=True)
class ServiceProfile:
    """One service, all its starts together; seconds."""

    name: str
    role: str
    num_starts: int
    working_s: float  # with its work in progress
    waiting_s: float  # for another service
    cpu_s: float
    cpu_parts: Mapping[str, float]  # of the newest process: threads by name, "engine"; the largest first
    apply_s: Mapping[str, float]  # of a worker's newest process: mean of a version by stage, `heartbeats.APPLY_STAGES`

    @property
    def waiting_share(self) -> float | None:
        """Share of the time that it waited; None for a service that was not seen during a step."""
        whole_s = self.working_s + self.waiting_s
        return self.waiting_s / whole_s if whole_s > 0.0 else None


@dataclass(frozen=True, slots=True)
class RunProfile:
    """The times of a run; seconds."""

    steps: int
    step_wall_s: float  # from the start of the first step to the end of the last, without the time between sessions
    phases: tuple[Phase, ...]
    publish_s: float | None  # mean of a version, beside the steps
    publish_stages_s: Mapping[str, float]  # the same by stage: compare, upload, announce; empty in older runs
    before_s: float | None  # from the first service to the first step: start-up and the first evaluation
    after_s: float | None  # from the last step on: export and the last evaluation
    services: tuple[ServiceProfile, ...]

    @property
    def cpu_s(self) -> float:
        return sum(service.cpu_s for service in self.services)


def profile(rows: Iterable[Mapping[str, Any]], watched: WatchedTotals | None) -> RunProfile:
    """Return the profile of the lines of metrics.jsonl and of the totals that were watched; both may be incomplete."""
    steps = list(curves.steps_of(rows).values())
    times = [at for step in steps if (at := number(step.get("at"))) is not None]
    first_s = _phase_seconds(steps[0]) if steps else 0.0
    seconds = {name: sum(number(step.get(key)) or 0.0 for step in steps) for key, name in _PHASES.items()}
    seconds[OTHER] = sum(_rests(steps)) - _between_sessions(_rests(steps), watched)
    wall_s = sum(seconds.values())
    published = [s for step in steps if (s := number(step.get("publish_s"))) is not None]
    since, until = (watched.since, watched.until) if watched is not None else (None, None)
    return RunProfile(
        steps=len(steps),
        step_wall_s=wall_s,
        phases=tuple(Phase(name, s, s / wall_s if wall_s > 0.0 else 0.0) for name, s in seconds.items()),
        publish_s=sum(published) / len(published) if published else None,
        publish_stages_s=_means([step.get("publish_stages_s") for step in steps]),
        before_s=max(0.0, times[0] - first_s - since) if times and since is not None else None,
        after_s=max(0.0, until - times[-1]) if times and until is not None else None,
        services=tuple(sorted(map(_service, watched.services if watched is not None else ()), key=_order)),
    )


def _means(found: Iterable[Any]) -> dict[str, float]:
    """Return the mean of each key of these objects; anything else among them is left out."""
    values: dict[str, list[float]] = {}
    for one in found:
        for name, value in one.items() if isinstance(one, Mapping) else ():
            if (seconds := number(value)) is not None:
                values.setdefault(str(name), []).append(seconds)
    return {name: sum(each) / len(each) for name, each in values.items()}


def limits(run_profile: RunProfile) -> list[str]:
    """Return sentences about what the run waits for, and about its largest costs."""
    lines = []
    shares = {phase.name: phase.share for phase in run_profile.phases}
    waits = shares.get("wait for groups", 0.0)
    if run_profile.steps and waits > _SMALL:
        lines.append(
            f"the trainer waits for groups {waits:.0%} of the time: {_slower_role(run_profile.services)}; "
            "`penstock plan` says which bound on staleness or how many workers would keep it busy"
        )
    elif run_profile.steps:
        lines.append(
            f"the trainer never waits for long ({waits:.0%} of the time): its steps decide how fast the run is"
        )
    lines += [
        f"{name} takes {shares[name]:.0%} of the time: {cure}"
        for name, cure in _CURES.items()
        if shares.get(name, 0.0) > _SMALL
    ]
    if run_profile.cpu_s > 0.0:
        largest = max(run_profile.services, key=lambda service: service.cpu_s)
        part = next(iter(largest.cpu_parts.items()), None)
        named = f", {part[1]:.1f} s of it in {part[0]}" if part is not None else ""
        lines.append(
            f"{largest.name} uses the most CPU: {largest.cpu_s:.1f} of {run_profile.cpu_s:.1f} s, "
            f"{largest.cpu_s / run_profile.cpu_s:.0%}{named}"
        )
    return lines


def _slower_role(services: Sequence[ServiceProfile]) -> str:
    shares = [
        (share, service)
        for service in services
        if service.role != "trainer" and (share := service.waiting_share) is not None
    ]
    if not shares:
        return "what for is not known without heartbeats"
    share, busiest = min(shares, key=lambda pair: pair[0])
    if share > 0.5:
        return f"so do the others ({busiest.name}, the busiest, {share:.0%}), each for the slowest groups of a batch"
    return f"{busiest.name} works {1.0 - share:.0%} of the time"


def _phase_seconds(step: Mapping[str, Any]) -> float:
    return sum(number(step.get(key)) or 0.0 for key in _PHASES)


def _rests(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each step after the first the seconds since the one before it that no phase has."""
    rests = []
    for before, after in pairwise(steps):
        since, at = number(before.get("at")), number(after.get("at"))
        if since is not None and at is not None:
            rests.append(max(0.0, at - since - _phase_seconds(after)))
    return rests


def _between_sessions(rests: Sequence[float], watched: WatchedTotals | None) -> float:
    """Return how much of these seconds lies between sessions: each start of the trainer is in one of the longest."""
    if watched is None:
        return 0.0
    num_resumed = sum(service.num_starts - 1 for service in watched.services if service.beat.role == "trainer")
    return min(watched.paused_s, sum(sorted(rests, reverse=True)[:num_resumed]))


def _service(totals: ServiceTotals) -> ServiceProfile:
    figures = totals.beat.figures
    parts = {name.removeprefix(THREAD_CPU): s for name, s in figures.items() if name.startswith(THREAD_CPU)}
    if engine_s := figures.get(ENGINE_CPU):
        parts["engine"] = engine_s
    return ServiceProfile(
        name=service_name(totals.beat.role, totals.beat.service_id),
        role=totals.beat.role,
        num_starts=totals.num_starts,
        working_s=totals.busy_s,
        waiting_s=totals.idle_s,
        cpu_s=totals.earlier_cpu_s + totals.beat.cpu_s,
        apply_s=apply_means(figures),
        cpu_parts=dict(sorted(parts.items(), key=lambda part: part[1], reverse=True)),
    )


def _order(service: ServiceProfile) -> tuple[int, str]:
    return _ROLES.index(service.role), service.name


def print_profile(run: NamedRun, *, as_json: bool) -> int:
    folder = existing_folder(run)
    run_profile = profile(curves.rows(folder), run_snapshot.load_totals(folder))
    if not run_profile.steps and not run_profile.services:
        raise ConfigError(
            f"run {run} has no steps in {folder / 'metrics.jsonl'} yet; wait for the first one: penstock watch {run}"
        )
    if as_json:
        print(json.dumps(document(run.id, run_profile)))
    else:
        _print(run.id, run_profile)
    return 0


def document(run: str, run_profile: RunProfile) -> dict[str, Any]:
    services = [{**asdict(service), "waiting_share": service.waiting_share} for service in run_profile.services]
    return {
        "run_id": run,
        **asdict(run_profile),
        "services": services,
        "cpu_s": run_profile.cpu_s,
        "says": limits(run_profile),
    }


def _print(run: str, run_profile: RunProfile) -> None:
    out = console()
    out.print(
        f"run {run}: {run_profile.steps} steps in {run_profile.step_wall_s:.1f} s{_around(run_profile)}",
        highlight=False,
    )
    if run_profile.steps:
        out.print()
        numbers = ("ms a step", "s", "share")
        print_table(("trainer", *numbers), (_phase(phase, run_profile) for phase in run_profile.phases), right=numbers)
    if run_profile.publish_s is not None:
        out.print(
            f"\nbeside the steps: {run_profile.publish_s * 1000:.0f} ms to publish a version"
            f"{_stages(run_profile.publish_stages_s)}",
            highlight=False,
        )
    workers = [service.apply_s for service in run_profile.services]
    if means := _means(workers):
        out.print(f"a version at a worker: {sum(means.values()) * 1000:.0f} ms{_stages(means)}", highlight=False)
    if run_profile.services:
        out.print()
        numbers, parts = ("works s", "waits s", "waits", "CPU s", "CPU share"), "of its newest process"
        rows = (_service_cells(service, run_profile) for service in run_profile.services)
        print_table(("service", *numbers, parts), rows, right=numbers, wide=(parts,))
    else:
        out.print(
            "\nno heartbeats in its folder: `penstock train` and the quickstart keep them",
            highlight=False,
            markup=False,
        )
    for line in ("", *(f"- {text}" for text in limits(run_profile))):
        out.print(line, markup=False, highlight=False)


def _stages(seconds: Mapping[str, float]) -> str:
    return f": {', '.join(f'{name} {spent_s * 1000:.0f}' for name, spent_s in seconds.items())}" if seconds else ""


def _around(run_profile: RunProfile) -> str:
    parts = [
        f"{seconds:.1f} s {when}"
        for seconds, when in ((run_profile.before_s, "before the first"), (run_profile.after_s, "after the last"))
        if seconds is not None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _phase(phase: Phase, run_profile: RunProfile) -> tuple[str, ...]:
    each = phase.seconds / run_profile.steps * 1000
    return phase.name, f"{each:.1f}", f"{phase.seconds:.1f}", f"{phase.share:.1%}"


def _service_cells(service: ServiceProfile, run_profile: RunProfile) -> tuple[str, ...]:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in list(service.cpu_parts.items())[:_NUM_PARTS])
    starts = f" ({service.num_starts} starts)" if service.num_starts > 1 else ""
    waits = "–" if service.waiting_share is None else f"{service.waiting_share:.1%}"
    share = f"{service.cpu_s / run_profile.cpu_s:.1%}" if run_profile.cpu_s > 0.0 else "–"
    numbers = (f"{service.working_s:.1f}", f"{service.waiting_s:.1f}", waits, f"{service.cpu_s:.1f}", share)
    return service.name + starts, *numbers, parts
