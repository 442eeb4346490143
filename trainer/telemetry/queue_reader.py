"""Reads how many messages wait in the run's queues, and how full NATS's store is, for Prometheus; a thread of its own, only where metrics are served."""

from __future__ import annotations

import threading

import structlog

from penstock.protocol import streams
from penstock.protocol.errors import BusError
from penstock.protocol.transport.bus import Bus
from penstock.trainer.telemetry.trainer_metrics import TrainerMetrics

log = structlog.get_logger("trainer.telemetry.queue_reader")

PERIOD_S = 5.0


class QueueReader:
    """Asks JetStream for the state of the run's consumers and of the account every few seconds; use as a context manager."""

    def __init__(self, bus: Bus, run_id: str, metrics: TrainerMetrics) -> None:
        """Prepare to write into ``metrics``."""
        self._bus = bus
        self._specs = streams.consumers(run_id)
        self._metrics = metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="queues", daemon=True)

    def __enter__(self) -> QueueReader:
        """Start reading."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join(10.0)

    def read(self) -> None:
        """Read all queues, and the account, once."""
        store = self._bus.store_state()
        states = {spec: self._bus.consumer_state(spec) for spec in self._specs}
        found = {(spec.stream, spec.durable): pending.wait() for spec, pending in states.items()}
        self._metrics.queues = {
            names: {
                "pending": state.num_pending,
                "ack_pending": state.num_ack_pending,
                "redelivered": state.num_redelivered,
            }
            for names, state in found.items()
        }
        self._metrics.nats_store = store.wait()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self.read()
            except BusError as err:
                self._metrics.queues, self._metrics.nats_store = {}, None  # no figures rather than old ones
                log.debug("queues not read", error=str(err))
            self._stop.wait(PERIOD_S)
