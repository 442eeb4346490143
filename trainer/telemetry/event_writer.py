"""Writes metrics.jsonl in the run's folder, publishes events for the console, and writes the heartbeat.

| event             | when                              | fields                                                       |
|-------------------|-----------------------------------|--------------------------------------------------------------|
| `step`            | each optimizer step               | see `trainer/telemetry/metrics.py`                           |
| `eval`            | each evaluation                   | those of `EvalResult`                                        |
| `evaluation_lost` | an evaluation ends without result | ``version``, ``step``, ``reason``, ``text``                  |
| `weights`         | a version is announced            | those of `trainer/publishing/publication.py`'s `Publication` |
| `drop`            | groups were discarded             | ``groups`` by reason since the last; ``totals`` of the run   |
| `state`           | the run's phase changes           | ``text``, ``total_steps``, ``finished``                      |
| `alarm`           | the run stops by itself           | ``text``                                                     |
| `log`             | a run is resumed                  | ``text``, ``rolled_back``: steps, groups, seconds            |
|                   | log-probabilities are not stored  | ``text``; once in a session                                  |

`step`, `eval` and `evaluation_lost` are written to metrics.jsonl too.

The heartbeat is a record in the live bucket, written every second by a separate thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from penstock.protocol import heartbeats, streams, subjects
from penstock.protocol.errors import BusUnreachable, MissingStream, PenstockError
from penstock.protocol.facts import Heartbeat, RunEvent, encode
from penstock.protocol.heartbeats import Activity, cpu_seconds, thread_cpu_seconds
from penstock.protocol.metrics.gpu import GpuSampler
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.versions import PolicyVersion

log = structlog.get_logger("trainer.telemetry.event_writer")

SERVICE_ID = "trainer"
_DROPS_S = 5.0  # between two events of drops while a batch is waited for

METRICS_FILE = "metrics.jsonl"  # in the run's folder
SOURCE = "trainer"
_IN_METRICS = frozenset({"step", "eval", "evaluation_lost"})


class HeartbeatWriter:
    def __init__(
        self, *, bus: Bus, run_id: str, activity: Activity, gpus: GpuSampler, clock: Callable[[], float]
    ) -> None:
        self._bucket = bus.key_value(streams.live_bucket(run_id).bucket).wait()
        self._activity, self._gpus, self._clock = activity, gpus, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self.version: PolicyVersion | None = None
        self.figures: dict[str, float] = {}
        self.newest: Heartbeat | None = None
        self.metrics_url: str | None = None

    def __enter__(self) -> HeartbeatWriter:
        self._thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        if failure is None:
            with contextlib.suppress(BusUnreachable, MissingStream):
                self.publish(has_exited=True)

    def publish(self, *, has_exited: bool = False) -> None:
        busy_s, idle_s = self._activity.totals()
        record = Heartbeat(
            role="trainer",
            service_id=SERVICE_ID,
            at=self._clock(),
            state=heartbeats.EXITED if has_exited else self._activity.state,
            version=self.version,
            busy_s=busy_s,
            idle_s=idle_s,
            cpu_s=cpu_seconds(),
            figures={**self.figures, **self._gpus.figures(), **thread_cpu_seconds()},
            period_s=heartbeats.PERIOD_S,
            metrics_url=self.metrics_url,
        )
        self.newest = record
        expiry_s = heartbeats.EXITED_TTL_S if has_exited else heartbeats.expires_after_s(heartbeats.PERIOD_S)
        self._bucket.put(streams.heartbeat_key("trainer", SERVICE_ID), encode(record), ttl_s=expiry_s).wait()

    def _work(self) -> None:
        while True:
            try:
                self.publish()
            except (BusUnreachable, MissingStream) as err:  # the bucket is missing while it is made again
                log.debug("heartbeat not published", error=str(err))
            if self._stop.wait(heartbeats.PERIOD_S):
                return


class EventWriter:
    """Appends to metrics.jsonl and publishes events; thread-safe. ``clock`` returns seconds since the epoch."""

    def __init__(
        self,
        *,
        bus: Bus,
        run_id: str,
        folder: Path,
        clock: Callable[[], float],
        observe: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _data: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._bus, self._run_id, self._clock = bus, run_id, clock
        self._observe = observe
        self._session = secrets.token_hex(4)  # events of another session are other events, even for the same step
        self._num_events = 0
        self._lock = threading.Lock()
        self._unconfirmed: deque[Pending[Receipt]] = deque()
        self._path = folder / METRICS_FILE
        self._file = self._path.open("ab")

    def sync(self) -> int:
        """Write metrics.jsonl to the disk and return its length: a checkpoint covers these bytes, and an audit reads them."""
        with self._lock:
            os.fsync(self._file.fileno())
            return self._file.tell()

    def rewind(self, num_bytes: int) -> bytes:
        """Truncate metrics.jsonl to its length at a checkpoint, and return the lines after it: their steps are made again."""
        with self._lock:
            if self._file.tell() <= num_bytes:
                return b""
            with self._path.open("rb") as file:
                file.seek(num_bytes)
                removed = file.read()
            self._file.truncate(num_bytes)
            self._file.seek(num_bytes)
            return removed

    def write(self, kind: str, data: Mapping[str, Any]) -> None:
        """Write and publish one event, without waiting for the broker."""
        with self._lock:
            at = self._clock()
            self._observe(kind, data)
            if kind in _IN_METRICS:
                self._file.write(json.dumps({"kind": kind, "at": at, **data}).encode() + b"\n")
                self._file.flush()
            self._num_events += 1
            event = RunEvent(run_id=self._run_id, source=SOURCE, kind=kind, at=at, data=dict(data))
            msg_id = f"{SOURCE}:{self._session}:{self._num_events}"
            self._unconfirmed.append(self._bus.publish(subjects.events(self._run_id, kind), event, msg_id=msg_id))
            while self._unconfirmed and self._unconfirmed[0].done():
                self._check(self._unconfirmed.popleft())

    def close(self) -> None:
        with self._lock:
            while self._unconfirmed:
                self._check(self._unconfirmed.popleft())
            self._file.close()

    @staticmethod
    def _check(pending: Pending[Receipt]) -> None:
        try:
            pending.wait()
        except PenstockError as err:
            log.warning("event not published (metrics are in metrics.jsonl)", error=str(err))


class StepReporter:
    def __init__(self, events: EventWriter, heartbeat: HeartbeatWriter, dropped: Mapping[str, int]) -> None:
        self._events, self._heartbeat = events, heartbeat
        self._dropped, self._told_at = Counter(dropped), 0.0  # as last reported

    def report_drops(self, step: int, groups: Mapping[str, Any], *, every_s: float = _DROPS_S) -> None:
        dropped = Counter(groups["dropped"])
        if dropped != self._dropped and time.monotonic() - self._told_at >= every_s:
            self._events.write("drop", {"step": step, "groups": dict(dropped - self._dropped), "totals": groups})
            self._dropped, self._told_at = dropped, time.monotonic()

    def report(self, step: int, fields: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        self.report_drops(step, groups, every_s=0.0)
        self._events.write("step", {**fields, "groups": groups})
        counts = {f"groups_{name}": float(groups[name]) for name in ("trained", "outstanding")}
        self._heartbeat.figures = {"step": float(step), **counts}
