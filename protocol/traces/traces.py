"""What a service calls to record the traces of groups; does nothing unless a collector is configured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Literal

import structlog

from penstock.protocol.traces.recorder import SpanRecorder
from penstock.protocol.traces.spans import Span, SpanContext, Value, group_context, new_context, short

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
