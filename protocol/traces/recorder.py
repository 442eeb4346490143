"""Sends finished spans from a thread of its own; a collector that is slow or unreachable costs spans, never time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import structlog

from penstock.protocol.traces.spans import Span

log = structlog.get_logger("traces")

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
