"""Spans as OTLP over HTTP, by the libraries of OpenTelemetry; imported only where a collector is configured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, TraceFlags
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace.status import Status, StatusCode

import penstock
from penstock.protocol.traces.traces import Span, SpanContext


class OtlpExporter:
    def __init__(self, resource: Mapping[str, str]) -> None:
        # it logs each failure; the recorder logs a change
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter()
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("penstock", penstock.__version__)

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans; returns False when the collector did not take them in time."""
        return self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS

    def shut_down(self) -> None:
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=None if span.parent is None else _context(span.parent),
            resource=self._resource,
            attributes=dict(span.attributes),
            links=tuple(Link(_context(link)) for link in span.links),
            kind=SpanKind.INTERNAL,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
        )


def _context(context: SpanContext) -> OtelContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return OtelContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=False, trace_flags=flags)
