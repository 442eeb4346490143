"""Build the JSON documents of a run's panels, and the settings in which runs differ; pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.console.live.run_snapshot import ServiceLine, Snapshot
from penstock.console.report.event_fields import number
from penstock.console.report.learning import LABELS, held_out, mean
from penstock.console.web.reading.page_view import PageView, VersionNotes, histogram
from penstock.protocol.heartbeats import apply_means

MAX_TEXT = 2000  # characters of a message of an error, a state or an incident
_MAX_WORKERS = 200  # of one version
_MAX_EVALUATIONS = 2000  # of one split

# Bounds within which a figure is healthy, and the key of the diagnosis that explains a value outside of them.
BANDS: dict[str, tuple[float | None, float | None, str]] = {
    "clip_fraction": (0.0, 0.3, "clip"),
    "kl_behaviour": (0.0, 0.1, "kl"),
    "kl_reference": (None, 0.1, "kl_reference"),
    "kl_divergence": (None, 0.1, "kl_reference"),  # as scripts call it
    "entropy": (0.1, None, "entropy"),
    "ess_share": (0.5, 1.0, "ess"),
    "zero_signal_groups": (0.0, 0.5, "no_signal"),
    "truncated_share": (0.0, 0.25, "truncated"),
    "engine_gap": (0.0, 0.05, "engine_gap"),
}
_OUTSIDE = {
    "clip_fraction": "Many tokens are clipped: the steps are too large or the samples too old; lower trainer.lr or rollout.max_staleness.",
    "entropy": "The completions of a prompt have become nearly identical; lower trainer.lr or set algorithm.entropy_coefficient.",
    "zero_signal_groups": "In most groups all rewards are equal: they teach nothing; raise rollout.group_size or set algorithm.dynamic_sampling = true.",
}
_OF_A_SNAPSHOT = (  # what the overview shows unchanged
    "finished", "step", "total_steps", "eta_s", "reward_first", "generated_per_s", "trained_per_s", "staleness_mean", "staleness_max",
    "newest_version", "versions_published", "idle_share", "slots_used", "waiting_for", "learning", "num_incidents",
)  # fmt: skip
MAX_VALUE = 500  # characters of one value
_MISSING = "(not set)"
_SOURCES = {"bytes": "weights_bytes_", "misses": "weights_misses_", "peer_misses": "weights_peer_misses_"}


def summary(view: PageView, snapshot: Snapshot, *, state: str, is_live: bool) -> dict[str, Any]:
    """Return the overview of a run: its state, what it learned, who waits for which, and what is outside of its band."""
    return {
        "run_id": view.run_id,
        "state": state,
        "doing": snapshot.state[:MAX_TEXT],
        "is_live": is_live,
        "disconnected_s": round(snapshot.disconnected_s, 1),
        **{name: getattr(snapshot, name) for name in _OF_A_SNAPSHOT},
        "started_at": snapshot.started_at if view.series or snapshot.services else None,
        "elapsed_s": round(snapshot.elapsed_s, 1),
        "reward": snapshot.reward_now,
        "held_out": asdict(snapshot.held_out) | {"now": snapshot.held_out.now, "before": snapshot.held_out.before},
        "staleness_tokens": {str(age): tokens for age, tokens in snapshot.staleness_tokens.items()},
        "queues": asdict(snapshot.queues),
        "groups": view.group_counts().model_dump(mode="json"),
        "zero_signal_groups": snapshot.no_signal_share,
        "attention": snapshot.attention[:MAX_TEXT],
        "bands": bands(view, snapshot),
        "diagnoses": [diagnose.model_dump(mode="json") for diagnose in snapshot.diagnoses],
        "incidents": [
            {"at": incident.at, "text": incident.text[:MAX_TEXT], "kind": incident.kind}
            for incident in list(snapshot.incidents)[-50:]
        ],
        "figures": view.series.names,
        "labels": {name: text for name, text in LABELS.items() if name in view.series.names},
        "unreadable": view.unreadable_messages,
    }


def bands(view: PageView, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the newest value of each figure that has a healthy band, and a sentence for those outside."""
    diagnosed = {diagnose.key: f"{diagnose.what} {diagnose.cure}" for diagnose in snapshot.diagnoses}
    rows = []
    for name, (low, high, key) in BANDS.items():
        if (value := view.series.latest(name)) is None:
            continue
        is_healthy = (low is None or value >= low) and (high is None or value <= high)
        sentence = "" if is_healthy else diagnosed.get(key, _OUTSIDE.get(name, _generic(name, value, low, high)))
        rows.append(
            {"name": name, "label": LABELS.get(name, name), "value": value, "low": low, "high": high,
             "is_healthy": is_healthy, "sentence": sentence}
        )  # fmt: skip
    return rows


def _generic(name: str, value: float, low: float | None, high: float | None) -> str:
    edges = f"{low if low is not None else '−∞'} to {high if high is not None else '∞'}"
    return f"{LABELS.get(name, name)} is {value:.3g} in the last step; {edges} is usual."


def evaluations(view: PageView) -> list[dict[str, Any]]:
    rows = []
    for split in dict.fromkeys(point.split for point in view.evals):
        newest = [point for point in view.evals if point.split == split][-_MAX_EVALUATIONS:]
        measured = held_out(newest)
        rows.append(
            {
                "split": split,
                "measure": measured.measure,
                "name": measured.name,
                "success": newest[-1].success,
                "points": [
                    {"step": p.step, "version": p.version, "accuracy": p.accuracy, "reward": p.reward, "num_prompts": p.num_prompts}
                    for p in newest
                ],
            }
        )  # fmt: skip
    return rows


def checkpoints(view: PageView, evaluated: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the evaluated versions of a run, with the measure of each source, and the newest; ``evaluated`` are rows of `penstock eval`."""
    steps: dict[int, int | None] = {point.version: point.step for point in view.evals}
    # A step names the version before it.
    steps |= {point.fields.version + 1: point.number for point in view.points()[-1:]}
    measured: dict[int, dict[str, float | None]] = {version: {} for version in steps}
    for point in view.evals:
        measured[point.version][point.split] = point.reward if point.accuracy is None else point.accuracy
    for row in evaluated:
        version, values = row.get("step"), row.get("values")  # such a row has the version as its step
        if isinstance(version, int) and isinstance(values, Mapping):
            steps.setdefault(version, None)
            measured.setdefault(version, {}).update({name: number(value) for name, value in values.items()})
    return [{"step": steps[v], "path": f"{view.run_id}@{v}", "eval_results": measured[v]} for v in sorted(steps)]


def services(view: PageView, snapshot: Snapshot) -> dict[str, Any]:
    lines = [_service(view, snapshot, line) for line in snapshot.services]
    spread: dict[str, dict[str, dict[str, float]]] = {}
    for role in dict.fromkeys(str(line["role"]) for line in lines):
        alive = [line for line in lines if line["role"] == role and line["alive"]]
        named: dict[str, list[float]] = {}
        for line in alive:
            numbers = {n: line[n] for n in ("tokens_per_s", "idle_share", "lag", "version") if line[n] is not None}
            for name, value in {**line["figures"], **numbers}.items():
                named.setdefault(name, []).append(float(value))
        spread[role] = {name: _spread(values) for name, values in sorted(named.items())}
    now = {"newest_version": snapshot.newest_version, "queues": asdict(snapshot.queues)}
    return {"services": lines, "spread": spread, **now}


def _service(view: PageView, snapshot: Snapshot, line: ServiceLine) -> dict[str, Any]:
    document = asdict(line) | {"state": line.state[:MAX_TEXT], "silent_s": round(line.silent_s, 1)}
    beat = view.beats.get((line.role, line.service_id))
    times = {} if beat is None else {"cpu_s": beat.cpu_s, "busy_s": beat.busy_s, "idle_s": beat.idle_s}
    return document | {
        "id": document.pop("service_id"),
        "name": line.name,
        "lag": None if line.version is None else snapshot.versions_behind(line),
        "figures": {} if beat is None else {**beat.figures, **times},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "mean": mean(values), "max": max(values), "num": len(values)}


def versions(view: PageView, *, before: int | None, limit: int) -> dict[str, Any]:
    """Return the newest versions below ``before``, what each worker took to adopt them, and where it read their bytes from."""
    numbers = sorted((n for n in view.versions if before is None or n < before), reverse=True)
    shown = numbers[:limit]
    workers = {worker: beat for (role, worker), beat in sorted(view.beats.items()) if role == "rollout"}
    return {
        "versions": [_version(view, number, view.versions[number]) for number in shown],
        "next": shown[-1] if len(numbers) > limit else None,
        "serving": view.serving() or {name: beat.version for name, beat in workers.items() if beat.version is not None},
        "apply_s": {worker: means for worker, beat in workers.items() if (means := apply_means(beat.figures))},
        "sources": {worker: _sources(beat.figures) for worker, beat in workers.items()},
        "newest": max(view.published, default=None),
    }


def _sources(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return bytes by store and misses by reason, since the worker's process started."""
    return {
        kind: {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}
        for kind, prefix in _SOURCES.items()
    }


def _version(view: PageView, number: int, notes: VersionNotes) -> dict[str, Any]:
    publication = view.publications.get(number)
    adopted = sorted(notes.adopted.values(), key=lambda fact: fact.worker_id)

    def spread(read: Callable[[Any], float], facts: Sequence[Any]) -> dict[str, float] | None:
        return _spread([read(fact) for fact in facts]) if facts else None

    return {
        "version": number,
        "step": notes.step,
        "published_at": notes.announced_at,
        "kind": publication.kind if publication else "",
        "publish_s": publication.publish_s if publication else None,
        "compare_s": publication.diff_s if publication else None,
        "upload_s": publication.upload_s if publication else None,
        "raw_bytes": publication.raw_bytes if publication else None,
        "sent_bytes": publication.sent_bytes if publication else notes.num_bytes,
        "density": publication.density if publication else None,
        "num_adopted": len(adopted),
        "pause_s": spread(lambda fact: fact.pause_s, [fact for fact in adopted if fact.previous_version is not None]),
        "fetch_s": spread(lambda fact: fact.fetch_s, adopted),
        "fetched_bytes": sum(fact.num_bytes for fact in adopted),
        "workers": [
            {"worker": fact.worker_id, "pause_s": fact.pause_s, "fetch_s": fact.fetch_s, "bytes": fact.num_bytes,
             "from": fact.previous_version}
            for fact in adopted[:_MAX_WORKERS]
        ],
        "refused": {worker: reason[:MAX_TEXT] for worker, reason in list(notes.refused.items())[:_MAX_WORKERS]},
    }  # fmt: skip


def rewards(view: PageView, recent: dict[str, list[float]], num_steps: int) -> dict[str, Any]:
    errors = [
        {"reason": reason, **asdict(notes), "newest": notes.newest[:MAX_TEXT]}
        for reason, notes in view.reward_errors.items()
    ]
    return {
        "errors": sorted(errors, key=lambda one: (-one["dead"], -one["waited"])),
        "scored_by": {name: share.model_dump() for name, share in view.scorers().items()},
        "distribution": {name: distribution(values) for name, values in recent.items() if values},
        "distribution_steps": num_steps,
    }  # fmt: skip


def distribution(values: Sequence[float]) -> dict[str, Any]:
    return {**histogram(values), "num": len(values), "mean": mean(values), "min": min(values), "max": max(values)}


def flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return every setting as ``section.key`` and its value as JSON; a list is one value."""
    if isinstance(settings, Mapping) and settings:
        values: dict[str, str] = {}
        for key, value in settings.items():
            values |= flat(value, f"{prefix}.{key}" if prefix else str(key))
        return values
    return {prefix: json.dumps(settings, ensure_ascii=False)[:MAX_VALUE]} if prefix else {}


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings in which runs differ, with the value of each run; ``configs`` are the documents by run."""
    values = {run: flat(config.get("settings", config)) for run, config in configs.items()}
    keys = sorted({key for value in values.values() for key in value})
    rows = [{"key": key, "values": [value.get(key, _MISSING) for value in values.values()]} for key in keys]
    differing = [row for row in rows if len(set(row["values"])) > 1]
    return {"runs": list(values), "differing": differing, "num_equal": len(rows) - len(differing)}
