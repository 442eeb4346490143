"""List the runs with a curve of each, and watch those that are looked at, from the first request until two minutes after the last.

A run's metrics are read again only when they have changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.report import curves
from penstock.console.tools import runs
from penstock.console.tools.runs import RunLine
from penstock.console.web.reading.page_view import bucket_size
from penstock.console.web.reading.run_reading import RunReading
from penstock.protocol.errors import BusError, PenstockError
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.bus import Bus

_POINTS = 60  # of a curve
_MAX_RUNS = 500
_BROKER_S = 2.0
_FIELDS = ("run", "state", "step", "accuracy", "reward", "eval_reward", "loss", "eval_loss", "when")
_lock = threading.Lock()
MAX_OPEN = 24  # runs watched at a time; the one that was asked for longest ago is closed for another
_IDLE_S = 120.0
_PERIOD_S = 0.5
log = structlog.get_logger("console.open_runs")


@dataclass(frozen=True, slots=True)
class _Known:
    seen: tuple[int, int] | None
    line: RunLine
    curve: list[float]
    varied: dict[str, Any]
    until: float  # the metrics of a long run that goes on are not read again at each step


_known: dict[Path, _Known] = {}


def listed_runs(arguments: Sequence[str], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the runs of the folder, and those on the configured NATS server, newest first. Raises ConfigError."""
    loaded = connections.find(arguments, environ)
    folder = loaded.settings.run.dir
    known_runs = {path: _describe(path) for path in runs.run_folders(folder)[:_MAX_RUNS] if not path.is_symlink()}
    lines = [known_run.line for known_run in known_runs.values()]
    if connections.is_configured(loaded) and connections.may_answer(loaded.settings.nats.url):
        try:
            with Bus.connect(loaded.settings.nats, name="console-runs", deadline_s=_BROKER_S) as bus:
                lines = runs.merge(lines, runs.list_broker(bus))
        except BusError:
            pass  # those of the folder are listed; the page shows each of them from its files
    own = {known.line.run: {"curve": known.curve, "varied": known.varied} for known in known_runs.values()}
    lines = sorted(lines, key=lambda line: line.when, reverse=True)[:_MAX_RUNS]
    return [
        {name: value for name, value in asdict(line).items() if name in _FIELDS} | own.get(line.run, {})
        for line in lines
    ]


def _describe(path: Path) -> _Known:
    seen = curves.metrics_stamp(curves.metrics_file(path))
    with _lock:
        known = _known.get(path)
    started = time.monotonic()
    if known is not None and (known.seen == seen or started < known.until):
        return replace(known, line=replace(known.line, state=runs.state_of(path)))
    line = runs.describe(path)
    trained = curves.read_training(path)
    values = trained.losses if trained is not None else [value for _, value in curves.read(path).rewards]
    size = bucket_size(len(values), _POINTS)
    buckets = [values[at : at + size] for at in range(0, len(values), size)]
    curve = [float(f"{sum(bucket) / len(bucket):.4g}") for bucket in buckets]
    description = _Known(seen, line, curve, runs.varied(path), time.monotonic() + 20 * (time.monotonic() - started))
    with _lock:
        if len(_known) > 2 * _MAX_RUNS:
            _known.clear()
        _known[path] = description
    return description


class UnknownRun(PenstockError):
    """There is no such run in the folder of runs, nor on NATS."""


class OpenRuns:
    """Watches at most `MAX_OPEN` runs in one separate thread, which starts with the first of them."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        idle_s: float = _IDLE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments, self._environ = list(arguments), dict(environ)
        self._idle_s = idle_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._open: dict[str, tuple[RunReading, float]] = {}  # with the time of the last request
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        return connections.find(self._arguments, self._environ).settings.run.dir

    def get(self, run_id: str) -> RunReading:
        """Return a run, opening it first if need be. Raises UnknownRun, ConfigError."""
        check_run_id(run_id)
        open_reading = self._used(run_id)
        if open_reading is not None:
            return open_reading
        with self._opening:
            open_reading = self._used(run_id)
            if open_reading is not None:
                return open_reading
            reading = RunReading(NamedRun(run_id, self._arguments, self._environ))
            is_link = reading.folder.is_symlink()
            if not is_link:
                reading.step()
            if is_link or not reading.exists:
                reading.close()
                raise UnknownRun(str(runs.unknown_run(run_id, reading.folder.parent)))
            self._keep(run_id, reading)
            return reading

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._open)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        with self._lock:
            readings = [reading for reading, _ in self._open.values()]
            self._open.clear()
        for reading in readings:
            reading.close()

    def _used(self, run_id: str) -> RunReading | None:
        with self._lock:
            entry = self._open.get(run_id)
            if entry is None:
                return None
            self._open[run_id] = (entry[0], self._monotonic())
            return entry[0]

    def _keep(self, run_id: str, reading: RunReading) -> None:
        with self._lock:
            self._open[run_id] = (reading, self._monotonic())
            surplus = sorted(self._open.items(), key=lambda one: one[1][1])[: max(len(self._open) - MAX_OPEN, 0)]
            for name, _ in surplus:
                del self._open[name]
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="console-page", daemon=True)
                self._thread.start()
        for _, (closed, _) in surplus:
            closed.close()

    def _watch(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            now = self._monotonic()
            with self._lock:
                idle = [name for name, (_, used) in self._open.items() if now - used > self._idle_s]
                closing = [self._open.pop(name)[0] for name in idle]
                readings = [reading for reading, _ in self._open.values()]
            for reading in closing:
                reading.close()
            for reading in readings:
                try:
                    reading.step()
                except Exception:  # one run that cannot be read must not stop the others
                    log.exception("a run cannot be watched", run_id=reading.run_id)
