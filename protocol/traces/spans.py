"""Spans, the trace that a group has in every service, and the thread that sends finished spans.

A message carries one W3C ``traceparent`` for all of its groups. The trace of one group follows from it and from the group's
id, the same in every service, so that each group of a pack has a trace of its own and no message gets longer.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from penstock.protocol import trace_context

Value = str | int | float | bool
MAX_TEXT = 200  # characters of an attribute
log = structlog.get_logger("traces")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identity of a span: 32 and 16 hexadecimal digits."""

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
    """Return the first span of a group's trace; None for a missing, malformed or unsampled header."""
    trace_id = trace_context.trace_id(traceparent)
    if not trace_id.strip("0") or not int(traceparent[-2:], 16) & 1:
        return None
    digest = hashlib.sha256(f"{trace_id}:{group_id}".encode()).hexdigest()
    return SpanContext(digest[:32], digest[32:48])


def new_context(trace_id: str = "") -> SpanContext:
    """Return a span in a trace; in a new one unless it is given."""
    return SpanContext(trace_id or secrets.token_hex(16), secrets.token_hex(8))


def short(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Return attributes with long texts cut: ids of other services are in them."""
    return {key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in attributes.items()}


QUEUE_SPANS = 8192
_BATCH_SPANS = 512
_WAIT_S = 1.0
_CLOSE_S = 3.0  # for the spans that are left at the end

Export = Callable[[Sequence[Span]], bool]  # False: they were not taken


class SpanRecorder:
    """A bounded queue before the exporter; `put` never waits."""

    def __init__(self, export: Export, shut_down: Callable[[], None], *, most: int = QUEUE_SPANS) -> None:
        """``shut_down`` ends an export in progress."""
        self._export = export
        self._shut_down = shut_down
        self._queue: queue.Queue[Span] = queue.Queue(most)
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
        """Return the spans so far by outcome."""
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
                self._send(batch)

    def _next_batch(self) -> list[Span]:
        batch: list[Span] = []
        try:
            batch.append(self._queue.get(timeout=0.05 if self._stop.is_set() else _WAIT_S))
            while len(batch) < _BATCH_SPANS:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _send(self, batch: list[Span]) -> None:
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

    def _count(self, outcome: str, number: int) -> None:
        with self._lock:
            self._counts[outcome] += number
