"""The traces of a pack's groups while they are scored; `CURRENT_TRACE` carries them to the calls of endpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from penstock.protocol.traces.traces import SpanContext, Traces, Value, new_context


@dataclass(slots=True)
class PackTrace:
    """One delivery of a pack; each traced group gets a span for its scoring, and below it one for each request."""

    traces: Traces
    attributes: Mapping[str, Value]  # of every span
    started: float = field(default_factory=time.time)
    _groups: dict[str, tuple[SpanContext, SpanContext]] = field(default_factory=dict)  # first span, scoring

    @classmethod
    def start(
        cls, traces: Traces, traceparent: str, group_ids: Iterable[str], attributes: Mapping[str, Value]
    ) -> PackTrace:
        trace = cls(traces, attributes)
        if traces.is_on:
            for group_id in group_ids:
                if (first := traces.group(traceparent, group_id)) is not None:
                    trace._groups[group_id] = first, new_context(first.trace_id)
        return trace

    def scored(self, group_id: str, attributes: Mapping[str, Value]) -> None:
        self._record("score", group_id, self.started, attributes)

    def failed(self, group_id: str, error: str, outcome: str) -> None:
        self._record("score", group_id, self.started, {"outcome": outcome}, error)

    def requested(self, group_id: str, started: float, attributes: Mapping[str, Value], error: str) -> None:
        self._record("reward request", group_id, started, attributes, error)

    def _record(
        self, name: str, group_id: str, started: float, attributes: Mapping[str, Value], error: str = ""
    ) -> None:
        """Record the span of a group's scoring, below the group's first one, or of a request, below that of the scoring."""
        if (spans := self._groups.get(group_id)) is not None:
            first, scoring = spans
            context, parent = (scoring, first) if name == "score" else (new_context(first.trace_id), scoring)
            about = {**self.attributes, **attributes, "group_id": group_id}
            self.traces.record(name, context, parent, started, about, error=error)


CURRENT_TRACE: ContextVar[PackTrace | None] = ContextVar("pack_trace", default=None)
