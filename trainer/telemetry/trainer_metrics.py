"""The trainer's Prometheus metrics, made of the events and the heartbeat that it writes anyway, and of the queues' state in JetStream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from penstock.protocol import streams
from penstock.protocol.config.shared_sections import MetricsSettings
from penstock.protocol.errors import BusError
from penstock.protocol.facts import Heartbeat
from penstock.protocol.metrics.exporter import NO_CERTIFICATES, NO_FOLDERS, Exporter
from penstock.protocol.metrics.server import MetricsServer
from penstock.protocol.metrics.table import METRICS, Histogram, Samples
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.stream_admin import StoreState
from penstock.trainer.learner.step_metrics import ALL
from penstock.trainer.telemetry.event_writer import SERVICE_ID

_STEP_SECONDS, _STALENESS = "penstock_trainer_step_seconds", "penstock_trained_staleness_versions"
_PHASES = ("wait", "train", "publish", "checkpoint")

# Gauges of the newest step: metric -> key in the step's event; those that an event does not have are left out.
_OF_STEP = MappingProxyType(
    {
        "penstock_trainer_loss": "loss",
        "penstock_trainer_reward_mean": "reward_mean",
        "penstock_trainer_reward_stddev": "reward_std",
        "penstock_trainer_gradient_norm": "grad_norm",
        "penstock_trainer_learning_rate": "lr",
        "penstock_trainer_tokens_per_second": "train_tokens_per_s",
        "penstock_trainer_flops_per_second": "flops_per_s",
        "penstock_trainer_mfu_ratio": "mfu",
        "penstock_trainer_entropy_nats": "entropy",
        "penstock_trainer_ess_ratio": "ess_share",
        "penstock_trainer_clip_ratio": "clip_fraction",
        "penstock_trainer_rejected_ratio": "rejected_fraction",
        "penstock_trainer_truncated_ratio": "truncated_share",
        "penstock_trainer_zero_signal_groups_ratio": "zero_signal_groups",
        "penstock_trainer_completion_tokens_mean": "completion_tokens_mean",
        "penstock_trainer_staleness_versions_mean": "staleness_mean",
    }
)
_BY_LAYERS = MappingProxyType(
    {
        "penstock_trainer_layer_gradient_norm": "grad_norm_by_layers",
        "penstock_trainer_layer_update_ratio": "update_ratio_by_layers",
    }
)
_OF_ENVIRONMENTS = MappingProxyType(
    {
        "penstock_trainer_environment_reward_mean": "reward_mean",
        "penstock_trainer_environment_turns_mean": "turns_mean",
        "penstock_trainer_environment_tokens_mean": "tokens_mean",
        "penstock_trainer_environment_failed_attempts": "failures",
    }
)
_KL = MappingProxyType({"behaviour": "kl_behaviour", "reference": "kl_reference"})
log = structlog.get_logger("trainer.telemetry.queue_reader")
PERIOD_S = 5.0


class TrainerMetrics:
    """What events and checkpoints of this session amount to; thread-safe. ``clock`` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step: Mapping[str, Any] = {}  # the newest event of its kind, as are the next
        self._step_at: float | None = None
        self._eval: Mapping[str, Any] = {}
        self._checkpoint_at: float | None = None
        self._tokens_trained = 0
        self._updates_left_out = 0
        self._mismatch: float | None = None  # of the last step that could be compared
        self._published: dict[str, tuple[int, int]] = {}  # kind -> versions, bytes
        self._seconds = {phase: Histogram(METRICS[_STEP_SECONDS].buckets) for phase in _PHASES}
        self._staleness = Histogram(METRICS[_STALENESS].buckets)
        self.queues: Mapping[tuple[str, str], Mapping[str, int]] = {}  # (stream, consumer) -> counts; set as a whole
        self.nats_store: StoreState | None = None
        self._turn_s = {"wait": 0.0, "move": 0.0}  # of the turns on shared GPUs
        self.heartbeat: Callable[[], Heartbeat | None] = lambda: None
        self.url: str | None = None  # where they are served

    def observe(self, kind: str, data: Mapping[str, Any]) -> None:
        with self._lock:
            if kind == "step":
                self._observe_step(data)
            elif kind == "eval":
                self._eval = dict(data)
            elif kind == "weights":
                versions, num_bytes = self._published.get(data["kind"], (0, 0))
                self._published[data["kind"]] = versions + 1, num_bytes + data["sent_bytes"]
                self._seconds["publish"].observe(data["publish_s"])

    def checkpoint_written(self, seconds: float) -> None:
        with self._lock:
            self._checkpoint_at = self._clock()
            self._seconds["checkpoint"].observe(seconds)

    def collect(self, samples: Samples) -> None:
        with self._lock:
            self._collect_step(samples)
            if "turns" in self._step:
                samples.add("penstock_device_turns_total", self._step["turns"], role="trainer")
                for what, seconds in self._turn_s.items():
                    samples.add("penstock_device_turn_seconds_total", seconds, role="trainer", phase=what)
            self._collect_evaluation(samples)
            for phase, histogram in self._seconds.items():
                samples.add(_STEP_SECONDS, histogram, phase=phase)
            samples.add(_STALENESS, self._staleness)
            for kind, (versions, num_bytes) in self._published.items():
                samples.add("penstock_weights_published_total", versions, kind=kind)
                samples.add("penstock_weights_published_bytes_total", num_bytes, kind=kind)
            if self._checkpoint_at is not None:
                samples.add("penstock_trainer_last_checkpoint_timestamp_seconds", self._checkpoint_at)
        for (stream, consumer), counts in self.queues.items():
            for count, number in counts.items():
                samples.add(f"penstock_queue_{count}", number, stream=stream, consumer=consumer)
        if (store := self.nats_store) is not None:
            samples.add("penstock_nats_store_used_bytes", store.used)
            if store.limit is not None:
                samples.add("penstock_nats_store_limit_bytes", store.limit)

    def _observe_step(self, data: Mapping[str, Any]) -> None:
        self._step, self._step_at = dict(data), self._clock()
        self._seconds["wait"].observe(data["wait_s"])
        self._seconds["train"].observe(data["step_s"])
        self._tokens_trained += data["tokens_trained"]
        self._updates_left_out += data.get("updates_left_out", 0)
        for what in self._turn_s:
            self._turn_s[what] += data.get(f"turn_{what}_s", 0.0)
        if (mismatch := data.get("mismatch")) is not None:  # a step without tokens of its version says nothing new
            self._mismatch = mismatch["mean_abs"]
        for age, tokens in data["staleness_tokens"].items():
            self._staleness.observe(float(age), tokens)

    def _collect_step(self, samples: Samples) -> None:
        step = self._step
        samples.add("penstock_tokens_total", self._tokens_trained, outcome="trained")
        if self._step_at is None:
            return
        samples.add("penstock_trainer_steps_total", step["step"])
        samples.add("penstock_trainer_last_step_timestamp_seconds", self._step_at)
        samples.add("penstock_trainer_logprobs_lost_total", step.get("logprobs_lost", 0))
        for name, key in _OF_STEP.items():
            if step.get(key) is not None:
                samples.add(name, step[key])
        samples.add("penstock_trainer_updates_left_out_total", self._updates_left_out)
        self._collect_layers(samples)
        for against, key in _KL.items():
            if step.get(key) is not None:
                samples.add("penstock_trainer_kl_nats", step[key], against=against)
        if self._mismatch is not None:
            samples.add("penstock_trainer_engine_mismatch_nats", self._mismatch)
        for part, mean in step.get("reward_parts", {}).items():
            samples.add("penstock_trainer_reward_part_mean", mean, part=part)
        for environment, played in step.get("environments", {}).items():
            for name, key in _OF_ENVIRONMENTS.items():
                samples.add(name, played[key], environment=environment)
        _collect_groups(step["groups"], samples)

    def _collect_layers(self, samples: Samples) -> None:
        for name, key in _BY_LAYERS.items():
            for layers, value in self._step.get(key, {}).items():
                samples.add(name, value, layers=layers)
        if self._step.get("update_ratio") is not None:
            samples.add("penstock_trainer_layer_update_ratio", self._step["update_ratio"], layers=ALL)

    def _collect_evaluation(self, samples: Samples) -> None:
        if not self._eval:
            return
        samples.add("penstock_eval_version", self._eval["version"])
        samples.add("penstock_eval_reward_mean", self._eval["reward_mean"])
        if self._eval["accuracy"] is not None:
            samples.add("penstock_eval_accuracy_ratio", self._eval["accuracy"])


def _collect_groups(groups: Mapping[str, Any], samples: Samples) -> None:
    samples.add("penstock_trainer_groups_outstanding", groups["outstanding"])
    for outcome in ("issued", "issued_again", "given_up", "scored", "trained", "reused"):
        samples.add("penstock_groups_total", groups[outcome], outcome=outcome, reason="")
    for reason, count in groups["dropped"].items():
        samples.add("penstock_groups_total", count, outcome="dropped", reason=reason)
    for reason, count in groups["abandoned_completions"].items():
        samples.add("penstock_trainer_abandoned_completions_total", count, reason=reason)
        samples.add("penstock_trainer_abandoned_tokens_total", groups["abandoned_tokens"][reason], reason=reason)


@contextlib.contextmanager
def serving(
    settings: MetricsSettings,
    run_id: str,
    clock: Callable[[], float],
    spans: Callable[[], Mapping[str, int]] = dict,
    folders: Mapping[str, Path] = NO_FOLDERS,
    certificates: Mapping[str, float] = NO_CERTIFICATES,
) -> Iterator[TrainerMetrics]:
    """Serve the trainer's metrics in the block if a port is set; raises ConfigError when it cannot be listened on.

    ``spans`` returns the spans of traces so far by outcome; ``folders`` are those whose disk may fill, by setting;
    ``certificates`` the ends of those that it uses.
    """
    metrics = TrainerMetrics(clock)
    if settings.trainer_port is None:
        yield metrics
        return
    exporter = Exporter(
        "trainer",
        run_id=run_id,
        service_id=SERVICE_ID,
        heartbeat=lambda: metrics.heartbeat(),  # noqa: PLW0108  set later
        collect=metrics.collect,
        spans=spans,
        folders=folders,
        certificates=certificates,
    )
    with MetricsServer(settings.host, settings.trainer_port, exporter.page, key="trainer_port") as server:
        metrics.url = server.url
        yield metrics


class QueueReader:
    def __init__(self, bus: Bus, run_id: str, metrics: TrainerMetrics) -> None:
        self._bus = bus
        self._specs = streams.consumers(run_id)
        self._metrics = metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="queues", daemon=True)

    def __enter__(self) -> QueueReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def read(self) -> None:
        store = self._bus.store_state()
        states = {spec: self._bus.consumer_state(spec) for spec in self._specs}
        by_consumer = {(spec.stream, spec.durable): pending.wait() for spec, pending in states.items()}
        self._metrics.queues = {
            names: {
                "pending": state.num_pending,
                "ack_pending": state.num_ack_pending,
                "redelivered": state.num_redelivered,
            }
            for names, state in by_consumer.items()
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
