"""Figures of a trainer that is not Penstock's: into a run's stream of events, or to a console over HTTP and to W&B."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import httpx
import structlog

from penstock.console import connections
from penstock.console.report.curves import METRICS
from penstock.console.tracking.interface import Destination, Row
from penstock.console.tracking.writers.wandb import KIND, WandbWriter
from penstock.protocol import streams, subjects
from penstock.protocol.config.schema_keys import SECTIONS
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.facts import RunEvent
from penstock.protocol.subjects import check_run_id, similar_run_id
from penstock.protocol.transport import tls
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.loop_thread import Pending

_log = structlog.get_logger("console.metrics_log")

SOURCE = "log"
_CONNECT_S = 10.0
_MOST_PENDING = 1000  # while NATS is unreachable
CONSOLE_URL = "http://127.0.0.1:8800"
TOKEN = "PENSTOCK_CONSOLE_TOKEN"  # noqa: S105 - the name of a variable
_ENDS = {"failed": "failed", "error": "failed", "finished": "finished", "completed": "finished"}  # by status
_MOST_WAITING = 100_000  # events, while the console does not answer
_MOST_NAME, _MOST_TEXT = 120, 2000  # characters
_MOST_FIGURES = 300  # of one event
_BATCH = 500  # events of one request
_PERIOD_S = 0.5  # between two requests
_MOST_PAUSE_S = 10.0  # between two attempts
_BEAT_S = 30.0  # a script without new figures reports that it still runs
_ANSWER_S = 10.0
_CLOSE_S = 60.0


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
        self._publish(METRICS, {"step": step, "values": _finite(step, values)})

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


def _finite(step: int, values: Mapping[str, float]) -> dict[str, float]:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step {step!r}: expected a whole number of at least 0")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or sys.float_info.max < abs(value) != math.inf:
            raise ConfigError(f"{name} = {value!r:.80}: expected a number; convert it with float()")
    return {name[:_MOST_NAME]: float(value) for name, value in values.items() if math.isfinite(value)}


class DualLogger:
    """Sends what a script measures to a console and, from the same object, to W&B; waits for neither.

        logger = penstock.DualLogger("my-job", wandb_project="math")
        logger.log_metrics(step, {"loss": loss})
        logger.finish()

    While the console does not answer, up to 100,000 events wait; ``num_lost`` counts those that were never stored.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the arguments of the platform guide
        self,
        job_uuid: str,
        platform_url: str | None = None,
        platform_enabled: bool = True,
        wandb_project: str | None = None,
        wandb_run_name: str | None = None,
        wandb_entity: str | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        wandb_tags: Sequence[str] | None = None,
        wandb_enabled: bool = True,
    ) -> None:
        """Begin a run, or continue it. The console is at ``platform_url``, else at PLATFORM_URL, else on this machine.

        Its token is PENSTOCK_CONSOLE_TOKEN, of role log. W&B is used where a project is given, or WANDB_PROJECT is set. Raises
        ConfigError when the console refuses, or wandb is not installed; a console that does not answer is tried again later.
        """
        self.num_lost = 0
        self._run = check_run_id(similar_run_id(job_uuid) or job_uuid)
        self._step, self._state, self._pid = 0, "running", os.getpid()
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)  # events as JSON
        self._thread = self._wandb = None
        self._close_by = math.inf
        if project := wandb_enabled and (wandb_project or os.environ.get("WANDB_PROJECT")):
            KIND.require_installed()
            key = hashlib.sha256(self._run.encode()).hexdigest()[:16]  # a script continues its run of W&B
            place = Path(os.environ.get("WANDB_DIR", "."))
            names = Destination(self._run, project, wandb_run_name or job_uuid, place, key, entity=wandb_entity or "")
            self._wandb = WandbWriter(replace(names, tags=wandb_tags or ()))
            self._row = self._wandb.last_event or 0
        if platform_enabled:
            self._client = _client((platform_url or os.environ.get("PLATFORM_URL", CONSOLE_URL)).rstrip("/"))
            try:
                if problem := self._post([]):
                    _log.warning("events wait", run=self._run, error=problem)
            except ConfigError:
                self._client.close()
                raise
            self._thread = threading.Thread(target=self._work, name="dual-logger", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self.log_config(wandb_config or {})

    def log_metrics(self, step: int, metrics: Mapping[str, float], epoch: float | None = None) -> None:
        """Send the figures of one step; one that is not finite is left out. Raises ConfigError for what is no number."""
        figures = _finite(step, metrics if epoch is None else {**metrics, "epoch": epoch})
        self._step = step
        for names in (list(figures)[first : first + _MOST_FIGURES] for first in range(0, len(figures), _MOST_FIGURES)):
            self._send(METRICS, step=step, values={name: figures[name] for name in names})
        if self._wandb is not None:
            self._row += 1
            self._wandb.write(Row(self._row, step, time.time(), figures))

    def log_gpu_usage(
        self, gpu_index: int, utilization: float, memory_used: float, memory_total: float, temperature: float = math.nan
    ) -> None:
        """Send the use of one GPU at the step logged last: percent, GB, GB, degrees Celsius."""
        figures = {"utilization": utilization, "memory_used": memory_used, "memory_total": memory_total}
        figures["temperature"] = temperature
        self.log_metrics(self._step, {f"gpu/{gpu_index}/{name}": value for name, value in figures.items()})

    def log_checkpoint(self, step: int, checkpoint_path: str, eval_results: Mapping[str, float] | None = None) -> None:
        results = _finite(step, eval_results or {})
        self._send("checkpoint", step=step, values=results, text=str(checkpoint_path))
        self.log_metrics(step, {f"eval/{name}": value for name, value in results.items()})

    def log_status(self, status: str, message: str = "") -> None:
        """Report a state; ``failed`` and ``finished`` (or ``completed``) are states of the run. An alert in W&B."""
        self._state = _ENDS.get(status.lower(), "running")
        self._send("state", text=": ".join(filter(None, (status, message))))
        if self._wandb is not None:
            self._wandb.alert(status, message)

    def log_config(self, config: Mapping[str, Any]) -> None:
        if config:
            self._send("config", values=json.loads(json.dumps(dict(config), default=str), parse_constant=str))
        if self._wandb is not None:
            self._wandb.configure(config)

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Send the final figures of the run, as ``summary/NAME`` of its last step."""
        self.log_metrics(self._step, {f"summary/{name}": value for name, value in summary.items()})
        if self._wandb is not None:
            self._wandb.summarise(summary)

    def finish(self) -> None:
        """End the run; waits at most a minute until all is sent."""
        if self._state == "running":
            self._state = "finished"
            self._send("state", text="finished")
        self.close()
        if self._wandb is not None:
            self._wandb.close(finished=True)

    def close(self) -> None:
        """Wait at most a minute until all is sent, without an end of the run; idempotent."""
        self._close_by = min(self._close_by, time.monotonic() + _CLOSE_S)
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):  # then the thread ends by `_close_by`
                self._waiting.put(None, timeout=_CLOSE_S)
            thread.join(_CLOSE_S + _ANSWER_S)
            self._client.close()
            atexit.unregister(self.close)

    def _send(self, kind: str, **event: Any) -> None:
        if self._thread is None:
            return
        if "text" in event:
            event["text"] = event["text"][:_MOST_TEXT]
        document = {"kind": kind, "at": time.time(), "state": self._state, **event}
        try:
            if os.getpid() != self._pid:  # a forked process has no thread that sends
                raise queue.Full
            self._waiting.put_nowait(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))
        except queue.Full:
            self.num_lost += 1

    def _work(self) -> None:
        """Send what waits; nothing after half a minute, so that the console knows that the script still runs. None is the last event."""
        is_closing = False
        while not is_closing and time.monotonic() < self._close_by:
            events: list[bytes | None] = []
            with contextlib.suppress(queue.Empty):
                events.append(self._waiting.get(timeout=_BEAT_S))
                time.sleep(_PERIOD_S if events[0] else 0.0)
                events += [self._waiting.get() for _ in range(min(self._waiting.qsize(), _BATCH))]
            is_closing = None in events
            self._deliver([event for event in events if event])
        if rest := self._waiting.qsize():
            self._lose(rest, f"the logger was closed {_CLOSE_S:.0f} s ago")

    def _deliver(self, events: list[bytes]) -> None:
        """Send events until they are stored, or the logger is closed for a minute; what is refused together is sent in parts."""
        pause = _PERIOD_S
        try:
            while problem := self._post(events):
                if (left := self._close_by - time.monotonic()) <= 0.0:
                    self._lose(len(events), problem)
                    return
                time.sleep(min(pause, left))
                pause = min(2 * pause, _MOST_PAUSE_S)
        except _EventsRefused as err:
            if len(events) <= 1:
                self._lose(len(events), str(err))
                return
            for part in (events[: len(events) // 2], events[len(events) // 2 :]):
                self._deliver(part)
        except ConfigError as err:
            self._lose(len(events), str(err))

    def _lose(self, num_events: int, problem: str) -> None:
        if num_events:
            self.num_lost += num_events
            _log.error("events not stored", run=self._run, events=num_events, error=problem)

    def _post(self, events: list[bytes]) -> str:
        """Return why the events wait, empty when they are stored. Raises ConfigError when the console refuses them."""
        body, left = b'{"events":[' + b",".join(events) + b"]}", self._close_by - time.monotonic()
        try:
            answer = self._client.post(
                f"/v1/runs/{self._run}/metrics", content=body, headers={"content-type": "application/json"},
                timeout=min(_ANSWER_S, max(left, 0.1)),
            )  # fmt: skip
        except httpx.HTTPError as err:
            return f"no console answers at {self._client.base_url} ({type(err).__name__})"
        if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS or answer.is_server_error:
            return f"the console answers {answer.status_code}"
        if not answer.is_success:
            fix = "" if TOKEN in os.environ else f"; set {TOKEN} to a token of: penstock console token NAME --role log"
            kind = (
                _EventsRefused
                if answer.status_code in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
                else ConfigError
            )
            raise kind(f"{self._client.base_url} answers {answer.status_code}: {answer.text[:500]}{fix}")
        return ""


class _EventsRefused(ConfigError):
    """The console refuses one of the events, or all of them together."""


def _client(url: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
    verify = tls.trust_own_authority(httpx.create_ssl_context()) if url.startswith("https:") else False
    return httpx.Client(base_url=url, headers=headers, timeout=_ANSWER_S, trust_env=False, verify=verify)


def init_logging(job_uuid: str | None = None, **options: Any) -> DualLogger:
    """Return a `DualLogger` of a job, by default of the one named by JOB_UUID."""
    return DualLogger(job_uuid or os.environ.get("JOB_UUID", ""), **options)


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
