"""A receiver of OpenTelemetry traces over HTTP, which decodes them with OpenTelemetry's own classes."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.protocol.traces.traces import Span, Traces
from tests.json_server import Handler, HttpServer


class Receiver(HttpServer):
    """Holds what was sent to it; ``status`` and ``delay_s`` are how it answers."""

    def __init__(self) -> None:
        service = pytest.importorskip(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="pip install 'penstock[traces]'"
        )
        self.spans: list[Any] = []
        self.services: list[str] = []  # of each span
        self.bodies: list[bytes] = []
        self.status, self.delay_s = 200, 0.0
        receiver = self

        class Collector(Handler):
            def serve(self) -> None:
                body = self.body()
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                time.sleep(receiver.delay_s)
                if receiver.status == 200 and self.path == "/v1/traces":
                    receiver._take(service.ExportTraceServiceRequest.FromString(body), body)
                self.answer(receiver.status)

        super().__init__(Collector)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def _take(self, request: Any, body: bytes) -> None:
        self.bodies.append(body)
        for of_resource in request.resource_spans:
            resource = {attribute.key: attribute.value.string_value for attribute in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += scope.spans
                self.services += [resource["service.name"]] * len(scope.spans)


def attributes(span: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }


def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Run a receiver in a fixture; this process and those it starts send their traces to it."""
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


class Recorded:
    """Takes the place of a recorder's thread: keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def counts(self) -> dict[str, int]:
        return {"exported": len(self.spans)}


def recorded() -> tuple[Traces, list[Span]]:
    kept: Any = Recorded()
    return Traces(kept), kept.spans
