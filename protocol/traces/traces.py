"""What a service calls to record the traces of groups; does nothing unless a collector is configured.

`HeldGroups` has the traces of the groups that a trainer has received, by group id, until they are trained or dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import structlog

from penstock.protocol.facts import Task
from penstock.protocol.traces.spans import Span, SpanContext, SpanRecorder, Value, group_context, new_context, short

log = structlog.get_logger("traces")

Role = Literal["trainer", "rollout", "reward"]
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Traces:
    """Records spans of groups; thread-safe."""

    def __init__(self, recorder: SpanRecorder | None = None) -> None:
        """Record into ``recorder``; None: nothing is recorded."""
        self._recorder = recorder

    @property
    def is_on(self) -> bool:
        """Whether spans are recorded: what they need is only gathered then."""
        return self._recorder is not None

    def group(self, traceparent: str, group_id: str) -> SpanContext | None:
        """Return the first span of a group's trace; None if the group is not traced."""
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
        """Record a span below the first one of a group's trace; nothing for None."""
        if group is not None:
            self.record(name, new_context(group.trace_id), group, started, attributes, ended=ended, error=error)

    def counts(self) -> dict[str, int]:
        """Return the spans so far by outcome; empty while nothing is recorded."""
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


_MAX_GROUPS = 50_000


@dataclass(frozen=True, slots=True)
class _Held:
    context: SpanContext
    since: float


@dataclass(slots=True)
class HeldGroups:
    """Remembers when each traced group arrived; thread-safe. Without traces it does nothing."""

    traces: Traces = NO_TRACES
    _groups: dict[str, _Held] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def issued(self, traceparent: str, tasks: Iterable[Task], *, pack_id: str, started: float) -> None:
        """Record the first span of each group's trace: its task is published."""
        if not self.traces.is_on:
            return
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
        """Remember groups that arrived scored."""
        if not self.traces.is_on:
            return
        now = time.time()
        with self._lock:
            for group_id in group_ids:
                if (context := self.traces.group(traceparent, group_id)) is not None:
                    self._groups[group_id] = _Held(context, now)
            while len(self._groups) > _MAX_GROUPS:
                del self._groups[next(iter(self._groups))]

    def ended(self, group_id: str, outcome: str, **attributes: Value) -> None:
        """Record that an arrived group is dropped or evaluated, from its arrival until now."""
        if self.traces.is_on:
            with self._lock:
                held = self._groups.pop(group_id, None)
            if held is not None:
                self.traces.record_in_group(outcome, held.context, held.since, {"group_id": group_id, **attributes})

    def trained(self, group_ids: Iterable[str], started: float, attributes: Mapping[str, Value]) -> None:
        """Record a step that links to its groups, and in each group's trace that it was trained."""
        if not self.traces.is_on:
            return
        with self._lock:
            held = {group_id: self._groups.get(group_id) for group_id in group_ids}
        traced = {group_id: one for group_id, one in held.items() if one is not None}
        step = new_context()
        links = tuple(one.context for one in traced.values())
        self.traces.record("train step", step, None, started, {**attributes, "num_groups": len(held)}, links=links)
        for group_id, one in traced.items():
            own = {**attributes, "group_id": group_id, "step_trace_id": step.trace_id}
            self.traces.record_in_group("admitted", one.context, one.since, {"group_id": group_id}, ended=started)
            self.traces.record_in_group("train", one.context, started, own)
