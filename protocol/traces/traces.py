"""Traces of groups: spans, the trace that a group has in every service, and the thread that sends finished spans; off unless a collector is configured.

A message carries one W3C ``traceparent`` for all of its groups. The trace of one group follows from it and from the group's
id, the same in every service, so that each group of a pack has a separate trace and no message gets longer.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import structlog

from penstock.protocol import trace_context
from penstock.protocol.groups import Task

Value = str | int | float | bool
MAX_TEXT = 200  # characters of an attribute
log = structlog.get_logger("traces")
QUEUE_SPANS = 8192
_BATCH_SPANS = 512
_WAIT_S = 1.0
_CLOSE_S = 3.0  # for the spans that are left at the end
Role = Literal["trainer", "rollout", "reward"]
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MAX_GROUPS = 50_000


@dataclass(frozen=True, slots=True)
class SpanContext:
    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span; times in seconds since the epoch."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: tuple[SpanContext, ...] = ()
    error: str = ""  # empty: it succeeded


def group_context(traceparent: str, group_id: str) -> SpanContext | None:
    trace_id = trace_context.trace_id(traceparent)
    if not trace_id.strip("0") or not int(traceparent[-2:], 16) & 1:
        return None
    digest = hashlib.sha256(f"{trace_id}:{group_id}".encode()).hexdigest()
    return SpanContext(digest[:32], digest[32:48])


def new_context(trace_id: str = "") -> SpanContext:
    return SpanContext(trace_id or secrets.token_hex(16), secrets.token_hex(8))


def short(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Return attributes with long texts cut: ids of other services are in them."""
    return {key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in attributes.items()}


Export = Callable[[Sequence[Span]], bool]  # False: they were not taken


class SpanRecorder:
    """A bounded queue before the exporter; `put` never waits."""

    def __init__(self, export: Export, shut_down: Callable[[], None]) -> None:
        self._export = export
        self._shut_down = shut_down
        self._queue: queue.Queue[Span] = queue.Queue(QUEUE_SPANS)
        self._lock = threading.Lock()
        self._counts = {"exported": 0, "failed": 0, "dropped": 0}
        self._is_failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Queue a span; drop it, counted, if the queue is full."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._count("dropped", 1)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Send what is queued, for at most a few seconds; the rest is dropped."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        self._shut_down()
        self._thread.join(_CLOSE_S)
        if left := self._queue.qsize():
            self._count("dropped", left)
        log.info("traces closed", **self.counts())

    def _work(self) -> None:
        while not (self._stop.is_set() and self._queue.empty()):
            if batch := self._next_batch():
                problem = "the collector did not take them; see the answer in its log"
                try:
                    is_taken = self._export(batch)
                except Exception as err:  # noqa: BLE001  a span is never worth the service; it is counted
                    is_taken, problem = False, f"{type(err).__name__}: {err}"
                self._count("exported" if is_taken else "failed", len(batch))
                if self._is_failing == is_taken:  # once for each change
                    self._is_failing = not is_taken
                    if is_taken:
                        log.info("traces are exported again")
                    else:
                        log.warning("spans not exported; the run goes on without them", spans=len(batch), error=problem)

    def _next_batch(self) -> list[Span]:
        batch: list[Span] = []
        try:
            batch.append(self._queue.get(timeout=0.05 if self._stop.is_set() else _WAIT_S))
            while len(batch) < _BATCH_SPANS:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _count(self, outcome: str, number: int) -> None:
        with self._lock:
            self._counts[outcome] += number


class Traces:
    def __init__(self, recorder: SpanRecorder | None = None) -> None:
        self._recorder = recorder

    @property
    def is_on(self) -> bool:
        """Whether spans are recorded: what they need is only gathered then."""
        return self._recorder is not None

    def group(self, traceparent: str, group_id: str) -> SpanContext | None:
        return group_context(traceparent, group_id) if self.is_on else None

    def record(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        started: float,
        attributes: Mapping[str, Value],
        *,
        ended: float | None = None,
        links: tuple[SpanContext, ...] = (),
        error: str = "",
    ) -> None:
        """Record a span; times are in seconds since the epoch, ``ended`` None is now."""
        if self._recorder is not None:
            ended = max(started, time.time() if ended is None else ended)
            self._recorder.put(Span(name, context, parent, started, ended, short(attributes), links, error))

    def record_in_group(
        self,
        name: str,
        group: SpanContext | None,
        started: float,
        attributes: Mapping[str, Value],
        *,
        ended: float | None = None,
        error: str = "",
    ) -> None:
        if group is not None:
            self.record(name, new_context(group.trace_id), group, started, attributes, ended=ended, error=error)

    def counts(self) -> dict[str, int]:
        return {} if self._recorder is None else self._recorder.counts()


NO_TRACES = Traces()


@contextlib.contextmanager
def recording(environ: Mapping[str, str], role: Role, *, service_id: str, run_id: str) -> Iterator[Traces]:
    """Record traces in the block if the variables of OpenTelemetry name a collector; send what is left at its end.

    ``environ`` is that of the process: the library reads the other variables by itself.
    """
    recorder = _open(environ, role, service_id, run_id)
    if recorder is None:
        yield NO_TRACES
        return
    try:
        yield Traces(recorder)
    finally:
        recorder.close()


def _open(environ: Mapping[str, str], role: Role, service_id: str, run_id: str) -> SpanRecorder | None:
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
    if not endpoint or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning(
            "no traces: set OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf, the only one there is", protocol=protocol
        )
        return None
    try:
        from penstock.protocol.traces.otlp import OtlpExporter  # noqa: PLC0415  an extra, and slow to import
    except ImportError as err:
        log.warning("no traces: pip install 'penstock[traces]', or unset OTEL_EXPORTER_OTLP_ENDPOINT", error=str(err))
        return None
    resource = {"service.instance.id": service_id, "penstock.run_id": run_id}
    if not environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = f"penstock-{role}"
    exporter = OtlpExporter(resource)
    log.info("traces", service=resource.get("service.name", ""), run_id=run_id)
    return SpanRecorder(exporter.export, exporter.shut_down)


class _Held(NamedTuple):
    context: SpanContext
    since: float


@dataclass(slots=True)
class HeldGroups:
    """Remembers when each traced group arrived; thread-safe. Without traces it does nothing."""

    traces: Traces = NO_TRACES
    _groups: dict[str, _Held] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def issued(self, traceparent: str, tasks: Iterable[Task], *, pack_id: str, started: float) -> None:
        for task in tasks:
            if (context := self.traces.group(traceparent, task.group_id)) is not None:
                attributes: dict[str, Value] = {
                    "group_id": task.group_id,
                    "pack_id": pack_id,
                    "split": task.split,
                    "attempt": task.attempt,
                    "issued_version": task.issued_version,
                    "group_size": task.group_size,
                    "prompt_tokens": len(task.prompt_ids),
                }
                self.traces.record("issue", context, None, started, attributes)

    def arrived(self, traceparent: str, group_ids: Iterable[str]) -> None:
        now = time.time()
        with self._lock:
            for group_id in group_ids:
                if (context := self.traces.group(traceparent, group_id)) is not None:
                    self._groups[group_id] = _Held(context, now)
            while len(self._groups) > _MAX_GROUPS:
                del self._groups[next(iter(self._groups))]

    def ended(self, group_id: str, outcome: str, **attributes: Value) -> None:
        with self._lock:
            held = self._groups.pop(group_id, None)
        if held is not None:
            self.traces.record_in_group(outcome, held.context, held.since, {"group_id": group_id, **attributes})

    def trained(self, group_ids: Iterable[str], started: float, attributes: Mapping[str, Value]) -> None:
        with self._lock:
            held = {group_id: self._groups.get(group_id) for group_id in group_ids}
        traced = {group_id: group for group_id, group in held.items() if group is not None}
        step = new_context()
        links = tuple(group.context for group in traced.values())
        self.traces.record("train step", step, None, started, {**attributes, "num_groups": len(held)}, links=links)
        for group_id, group in traced.items():
            group_attributes = {**attributes, "group_id": group_id, "step_trace_id": step.trace_id}
            self.traces.record_in_group("admitted", group.context, group.since, {"group_id": group_id}, ended=started)
            self.traces.record_in_group("train", group.context, started, group_attributes)
