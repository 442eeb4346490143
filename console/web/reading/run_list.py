"""The list of runs with the curve of each; a run's metrics are read again only when they have changed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.console import connections
from penstock.console.report import curves, fine_tuned
from penstock.console.tools import runs
from penstock.console.tools.runs import RunLine
from penstock.console.web.reading.step_series import bucket_size
from penstock.protocol.errors import BusError
from penstock.protocol.transport.bus import Bus

_POINTS = 60  # of a curve
_MAX_RUNS = 500
_BROKER_S = 2.0
_FIELDS = ("run", "state", "step", "accuracy", "reward", "eval_reward", "loss", "eval_loss", "when")


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of a run, and the size and time of its metrics then."""

    seen: tuple[int, int]
    line: RunLine
    curve: list[float]


_known: dict[Path, _Known] = {}
_lock = threading.Lock()


def rows(arguments: Sequence[str], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the runs of the folder, and those on the configured NATS server, newest first. Raises ConfigError."""
    loaded = connections.find(arguments, environ)
    folder = loaded.settings.run.dir
    found = {path: _describe(path) for path in runs.run_folders(folder)[:_MAX_RUNS]}
    lines = [one.line for one in found.values()]
    if connections.is_configured(loaded) and connections.may_answer(loaded.settings.nats.url):
        try:
            with Bus.connect(loaded.settings.nats, name="console-runs", deadline_s=_BROKER_S) as bus:
                lines = runs.merge(lines, runs.list_broker(bus))
        except BusError:
            pass  # those of the folder are listed; the page shows each of them from its files
    curve_of = {one.line.run: one.curve for one in found.values()}
    lines = sorted(lines, key=lambda line: line.when, reverse=True)[:_MAX_RUNS]
    return [
        {name: value for name, value in asdict(line).items() if name in _FIELDS} | {"curve": curve_of.get(line.run, [])}
        for line in lines
    ]


def _describe(path: Path) -> _Known:
    try:
        stat = fine_tuned.metrics_file(path).stat()
        seen = (stat.st_size, stat.st_mtime_ns)
    except OSError:
        seen = (0, 0)
    with _lock:
        known = _known.get(path)
    if known is not None and known.seen == seen:
        return replace(known, line=replace(known.line, state=runs.state_of(path)))
    line = runs.describe(path)
    trained = fine_tuned.read(path)
    values = trained.losses if trained is not None else [value for _, value in curves.read(path).rewards]
    found = _Known(seen, line, _curve(values))
    with _lock:
        if len(_known) > 2 * _MAX_RUNS:
            _known.clear()
        _known[path] = found
    return found


def _curve(values: Sequence[float]) -> list[float]:
    size = bucket_size(len(values), _POINTS)
    buckets = [values[at : at + size] for at in range(0, len(values), size)]
    return [float(f"{sum(bucket) / len(bucket):.4g}") for bucket in buckets]
