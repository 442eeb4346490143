"""What Prometheus scrapes from a worker is its newest heartbeat."""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.facts import Heartbeat
from penstock.protocol.metrics import gpu
from penstock.protocol.metrics.exporter import Exporter
from penstock.protocol.metrics.table import METRICS
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.rollout_service import heartbeat
from penstock.rollout_service.engines import engine_client
from penstock.rollout_service.metrics import WorkerMetrics


def documented(text: str) -> list[str]:
    return [line.split("`")[1] for line in text.splitlines() if line.startswith("| `engine_")]


def test_every_figure_of_the_heartbeat_is_a_metric(tmp_path: Path) -> None:
    """All counters of a worker and of its engine are shown with the heartbeat's values, and nothing else is."""
    snapshot = WorkerMetrics(turns=1).snapshot()
    assert snapshot.keys() - WorkerMetrics().snapshot().keys() == {"turns", "turn_wait_s", "turn_move_s"}
    names = [
        *snapshot,
        *SharedSegments("r", tmp_path).figures(),
        "packs_held",
        *documented(engine_client.__doc__ or ""),
        *gpu.NAMES,
    ]
    figures = {name: float(number) for number, name in enumerate(names, 1)}
    beat = Heartbeat(
        role="rollout", service_id="w", at=5.0, state="", version=3, busy_s=1.0, idle_s=2.0, cpu_s=3.0,
        figures={**figures, "of_a_foreign_engine": 9.0},
    )  # fmt: skip
    exporter = Exporter(
        "rollout",
        run_id="r",
        service_id="w",
        heartbeat=lambda: beat,
        collect=lambda samples: heartbeat.collect(beat, samples),
        folders={"worker.cache_dir": tmp_path, "not.yet": tmp_path / "none"},
    )
    samples = exporter.samples()
    assert set(samples.series.pop("penstock_store_errors_total")) == {("nats", "full"), ("s3", "full"), ("s3", "error")}
    free = samples.series.pop("penstock_disk_free_ratio")
    assert set(free) == {("rollout", "w", "worker.cache_dir")}, "a folder that is not there yet is left out"
    assert 0.0 < free["rollout", "w", "worker.cache_dir"] <= 1.0
    shown = sorted(value for name, series in samples.series.items() for value in series.values())
    assert shown == sorted([*figures.values(), 1.0, 5.0, 1.0, 2.0, 3.0, 3.0]), (
        "each figure once; info, time, busy, idle, cpu, version"
    )
    assert samples.series["penstock_weights_version"] == {("rollout", "w"): 3.0}
    expected = {name for name, metric in METRICS.items() if "rollout" in metric.services}
    assert expected - set(samples.series) == {
        "penstock_trace_spans_total", "penstock_disk_free_ratio", "penstock_store_errors_total",
        "penstock_certificate_expiry_timestamp_seconds",
    }  # fmt: skip


def test_a_worker_without_heartbeat_shows_its_name_only() -> None:
    exporter = Exporter("rollout", run_id="r", service_id="w", heartbeat=lambda: None, collect=lambda _samples: None)
    assert set(exporter.samples().series) == {"penstock_service_info", "penstock_store_errors_total"}
