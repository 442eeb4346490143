"""What Prometheus scrapes from the trainer is what its events and its heartbeat say."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.groups import make_task_issued
from tests.protocol.metrics.nvml import Nvml
from tests.servers import wait_for

from penstock.protocol import streams, subjects
from penstock.protocol.config.shared_sections import MetricsSettings
from penstock.protocol.facts import Heartbeat, RunEvent, decode
from penstock.protocol.heartbeats import Activity
from penstock.protocol.metrics.gpu import GpuSampler
from penstock.protocol.metrics.table import METRICS, LabelValues, Samples
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.telemetry import trainer_metrics
from penstock.trainer.telemetry.event_writer import SERVICE_ID, EventWriter, HeartbeatWriter, StepReporter
from penstock.trainer.telemetry.trainer_metrics import QueueReader

STEP: dict[str, Any] = {
    "step": 7, "version": 6, "loss": 0.25, "reward_mean": 0.5, "reward_std": 0.1, "zero_signal_groups": 0.2,
    "grad_norm": 1.5, "lr": 1e-4, "clip_fraction": 0.01, "rejected_fraction": 0.02, "ess_share": 0.9,
    "kl_behaviour": 0.03, "kl_reference": 0.04, "mismatch": {"tokens": 5, "mean_abs": 1e-6},
    "entropy": 0.7, "staleness_mean": 1.25, "staleness_tokens": {"0": 10, "1": 20, "40": 30},
    "reward_parts": {"format": 1.0}, "completion_tokens_mean": 12.0, "truncated_share": 0.1, "tokens_trained": 60,
    "wait_s": 0.02, "step_s": 2.0, "publish_s": 0.5, "train_tokens_per_s": 30.0, "flops_per_s": 5e9, "mfu": 0.25,
    "grad_norm_by_layers": {"attention": 1.2, "blocks 0-6": 0.9}, "update_ratio": 1e-3, "updates_left_out": 2,
    "update_ratio_by_layers": {"attention": 2e-3, "blocks 0-6": 5e-4},
    "environments": {
        "lake": {"episodes": 4, "reward_mean": 0.25, "turns_mean": 3.5, "tokens_mean": 40.0, "cut_share": 0.5, "failures": 2},
    },
}  # fmt: skip
GROUPS: dict[str, Any] = {
    "issued": 50, "issued_again": 3, "given_up": 1, "outstanding": 12, "scored": 40, "trained": 30, "reused": 2,
    "dropped": {"stale": 4, "dead": 1}, "abandoned_completions": {"aborted": 6}, "abandoned_tokens": {"aborted": 70},
}  # fmt: skip


def scrape(url: str) -> dict[str, float]:
    """Return all samples of a page by their line without the value."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_scrape_shows_the_events_and_the_heartbeat(bus: Bus, run_streams: str, tmp_path: Path) -> None:
    """The samples equal the fields of the published events and of the heartbeat in NATS; every metric of the table is there."""
    seen: dict[str, RunEvent] = {}
    bus.tail(
        f"{run_streams}-events",
        subjects.events(run_streams),
        RunEvent,
        lambda e: seen.update({e.kind: e}),
        from_start=True,
    ).wait()
    with trainer_metrics.serving(MetricsSettings(trainer_port=0), run_streams, lambda: 1000.0) as metrics:
        assert metrics.url is not None
        events = EventWriter(
            bus=bus, run_id=run_streams, folder=tmp_path, clock=lambda: 1000.0, observe=metrics.observe
        )
        gpus = GpuSampler(Nvml())
        heartbeat = HeartbeatWriter(bus=bus, run_id=run_streams, activity=Activity(), gpus=gpus, clock=lambda: 999.0)
        heartbeat.metrics_url, metrics.heartbeat = metrics.url, lambda: heartbeat.newest
        heartbeat.version = PolicyVersion(7)
        StepReporter(events, heartbeat, {}).report(7, STEP, GROUPS)
        events.write("eval", {"version": 5, "reward_mean": 0.4, "accuracy": 0.3})
        events.write("weights", {"version": 7, "kind": "patch", "sent_bytes": 1000, "publish_s": 0.4})
        events.write("weights", {"version": 8, "kind": "patch", "sent_bytes": 500, "publish_s": 0.4})
        metrics.checkpoint_written(3.5)
        bus.publish(subjects.tasks(run_streams, "train"), make_task_issued(run_streams, "p0"), msg_id="p0").wait()
        queues = QueueReader(bus, run_streams, metrics)
        tasks = streams.tasks_consumer(run_streams, "train")

        def task_is_pending() -> bool:  # the server counts a message for a consumer some time after it acknowledged it
            queues.read()
            return metrics.queues[tasks.stream, tasks.durable]["pending"] == 1

        wait_for(task_is_pending, "the task in its queue")
        with gpus:
            wait_for(gpus.figures, "the GPUs")
            heartbeat.publish()
        found = scrape(metrics.url)
        events.close()
    wait_for(lambda: set(seen) >= {"step", "eval", "weights"}, "the events")
    step, groups = seen["step"].data, seen["step"].data["groups"]
    for name, key in trainer_metrics._OF_STEP.items():
        assert found[name] == step[key], name
    assert found['penstock_trainer_kl_nats{against="behaviour"}'] == step["kl_behaviour"]
    assert found['penstock_trainer_reward_part_mean{part="format"}'] == step["reward_parts"]["format"]
    for name, key in trainer_metrics._OF_ENVIRONMENTS.items():
        assert found[f'{name}{{environment="lake"}}'] == step["environments"]["lake"][key], name
    for layers, norm in step["grad_norm_by_layers"].items():
        assert found[f'penstock_trainer_layer_gradient_norm{{layers="{layers}"}}'] == norm
    assert found['penstock_trainer_layer_update_ratio{layers="all"}'] == step["update_ratio"]
    assert found['penstock_trainer_layer_update_ratio{layers="blocks 0-6"}'] == 5e-4
    assert found["penstock_trainer_updates_left_out_total"] == 2
    assert found["penstock_trainer_engine_mismatch_nats"] == step["mismatch"]["mean_abs"]
    for outcome in ("issued", "issued_again", "given_up", "scored", "trained", "reused"):
        assert found[f'penstock_groups_total{{outcome="{outcome}",reason=""}}'] == groups[outcome]
    assert found['penstock_groups_total{outcome="dropped",reason="stale"}'] == groups["dropped"]["stale"]
    assert found['penstock_tokens_total{outcome="trained"}'] == step["tokens_trained"]
    assert found['penstock_trained_staleness_versions_bucket{le="0.0"}'] == 10
    assert found['penstock_trained_staleness_versions_bucket{le="32.0"}'] == 30
    assert found["penstock_trained_staleness_versions_count"] == 60
    assert found["penstock_trained_staleness_versions_sum"] == 20 + 40 * 30
    for phase, (count, total) in {
        "wait": (1, 0.02),
        "train": (1, 2.0),
        "publish": (2, 0.8),
        "checkpoint": (1, 3.5),
    }.items():
        assert found[f'penstock_trainer_step_seconds_count{{phase="{phase}"}}'] == count
        assert found[f'penstock_trainer_step_seconds_sum{{phase="{phase}"}}'] == pytest.approx(total)
    assert found['penstock_weights_published_bytes_total{kind="patch"}'] == 1500
    assert found["penstock_trainer_last_checkpoint_timestamp_seconds"] == 1000.0
    assert found["penstock_eval_accuracy_ratio"] == seen["eval"].data["accuracy"]
    queue = f'{{consumer="{streams.tasks_consumer(run_streams, "train").durable}",stream="{run_streams}-tasks"}}'
    assert found[f"penstock_queue_pending{queue}"] == 1

    bucket = bus.key_value(streams.live_bucket(run_streams).bucket).wait()
    entry = bucket.get(streams.heartbeat_key("trainer", SERVICE_ID)).wait()
    assert entry is not None
    beat = decode(entry.value, Heartbeat)
    assert beat.metrics_url == metrics.url
    who = '{role="trainer",worker="trainer"}'
    assert found[f"penstock_weights_version{who}"] == beat.version == 7
    assert found[f"penstock_busy_seconds_total{who}"] == beat.busy_s
    assert found[f"penstock_heartbeat_timestamp_seconds{who}"] == beat.at
    assert found['penstock_gpu_utilisation_ratio{role="trainer",statistic="max",worker="trainer"}'] == 0.9
    expected = {name for name, metric in METRICS.items() if "trainer" in metric.services}
    shown = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", line) for line in found}
    assert found["penstock_nats_store_used_bytes"] > 0
    absent = {"penstock_trace_spans_total", "penstock_disk_free_ratio", "penstock_nats_store_limit_bytes"}
    absent |= {"penstock_certificate_expiry_timestamp_seconds"}
    absent |= {"penstock_device_turns_total", "penstock_device_turn_seconds_total"}
    assert shown == expected - absent, "no span, folder, certificate or turn given, and an account without a limit"


def test_no_port_is_opened_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing listens, and the heartbeat names no address."""
    monkeypatch.setattr(trainer_metrics, "MetricsServer", None)
    with trainer_metrics.serving(MetricsSettings(), "run", lambda: 0.0) as metrics:
        assert metrics.url is None


def test_a_step_that_could_not_be_compared_leaves_the_last_comparison() -> None:
    """Else an alert on a difference would end with the first step whose tokens are all of older versions."""
    metrics = trainer_metrics.TrainerMetrics(lambda: 1000.0)
    found = []
    for mismatch in (None, {"tokens": 40, "mean_abs": 0.08}, None):
        metrics.observe("step", {**STEP, "groups": GROUPS, "mismatch": mismatch})
        samples = Samples("trainer", LabelValues())
        metrics.collect(samples)
        found.append(list(samples.series.get("penstock_trainer_engine_mismatch_nats", {}).values()))
    assert found == [[], [0.08], [0.08]]


def test_the_turns_of_a_shared_gpu_add_up() -> None:
    metrics, samples = trainer_metrics.TrainerMetrics(lambda: 1000.0), Samples("trainer", LabelValues())
    for turns in (1.0, 2.0):
        metrics.observe("step", {**STEP, "groups": GROUPS, "turns": turns, "turn_wait_s": 3.0, "turn_move_s": 0.5})
    metrics.collect(samples)
    assert list(samples.series["penstock_device_turns_total"].values()) == [2.0]
    assert list(samples.series["penstock_device_turn_seconds_total"].values()) == [6.0, 1.0]
