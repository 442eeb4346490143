"""Figures of a trainer that is not Penstock's, written into a run's stream of events."""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

import structlog

from penstock.console import connections
from penstock.console.tracking.consumer import METRICS
from penstock.protocol import streams, subjects
from penstock.protocol.config.schema_keys import SECTIONS
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.facts import RunEvent
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.loop_thread import Pending

_log = structlog.get_logger("console.metrics_log")

SOURCE = "log"
_CONNECT_S = 10.0
_MOST_PENDING = 1000  # while NATS is unreachable


class MetricsLog:
    """Writes metrics of any trainer to a run, for its trackers and for what reads its events.

        with penstock.MetricsLog("my-run") as metrics:
            metrics.log(step, {"train/loss": loss})

    `log` does not wait and does not raise for an unreachable server: what could not be sent is counted in ``num_lost``.
    Leaving the block without an exception marks the run as finished. Use it from one thread.
    """

    def __init__(self, run: str, *arguments: str) -> None:
        """Connect to the run; ``arguments`` are run files and settings such as ``"nats.url=nats://gpu-1:4222"``.

        Raises MissingStream when the run was never created (`penstock bootstrap run.id=RUN`), BusUnreachable, ConfigError.
        """
        settings = connections.find(arguments, os.environ, run_id=run).settings
        self.num_lost = 0
        self._run = run
        self._session = secrets.token_hex(4)
        self._num_events = 0
        self._unconfirmed: deque[Pending[Receipt]] = deque()
        self._bus = Bus.connect(settings.nats, name="metrics-log", deadline_s=_CONNECT_S)
        try:
            self._bus.stream_state(streams.stream_name(run, "events")).wait()
        except BaseException:
            self._bus.close()
            raise

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the figures of one step; one that is not finite is left out. Raises ConfigError for what is no number."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step {step!r}: expected a whole number of at least 0")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} = {value!r}: expected a number; convert it with float()")
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._publish(METRICS, {"step": step, "values": finite})

    def finish(self) -> None:
        self._publish("state", {"text": "finished", "finished": True})
        self.close()

    def close(self) -> None:
        """Wait until all is sent; idempotent."""
        while self._unconfirmed:
            self._check(self._unconfirmed.popleft())
        self._bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _publish(self, kind: str, data: dict[str, object]) -> None:
        self._num_events += 1
        event = RunEvent(run_id=self._run, source=SOURCE, kind=kind, at=time.time(), data=data)
        msg_id = f"{SOURCE}:{self._session}:{self._num_events}"
        while self._unconfirmed and (self._unconfirmed[0].done() or len(self._unconfirmed) >= _MOST_PENDING):
            self._check(self._unconfirmed.popleft())
        self._unconfirmed.append(self._bus.publish(subjects.events(self._run, kind), event, msg_id=msg_id))

    def _check(self, pending: Pending[Receipt]) -> None:
        try:
            pending.wait()
        except PenstockError as err:
            self.num_lost += 1
            _log.warning("metrics not sent", run=self._run, error=str(err))


def log_once(run: str, step: int, arguments: Sequence[str]) -> int:
    """Send the figures ``name=value`` among the arguments, whose others are settings; returns 1 when they were not sent."""
    figures, settings = _split(arguments)
    log = MetricsLog(run, *settings)
    try:
        log.log(step, figures)
    finally:
        log.close()
    if log.num_lost:
        print(f"penstock log: the figures of step {step} were not sent; repeat the command", file=sys.stderr)
    return 1 if log.num_lost else os.EX_OK


def _split(arguments: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    figures: dict[str, float] = {}
    settings: list[str] = []
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator or name.removeprefix("--").partition(".")[0] in SECTIONS:
            settings.append(argument)
            continue
        try:
            figures[name] = float(text)
        except ValueError:
            raise ConfigError(f"{argument}: expected NAME=NUMBER, such as train/loss=0.31") from None
    if not figures:
        raise ConfigError("nothing to log: give NAME=NUMBER, such as train/loss=0.31")
    return figures, settings
