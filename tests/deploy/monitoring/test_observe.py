"""A Prometheus beside a local run: it reads the addresses of one file, and has our alerts."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.servers import require_package, wait_for

from penstock.deploy.monitoring import observe
from penstock.deploy.monitoring.alerts import ALERTS
from penstock.protocol import seals
from penstock.protocol.metrics.server import MetricsServer


def page(_accept: str) -> tuple[bytes, str]:
    return b'penstock_service_info{role="rollout",worker="w",run="r",version="1"} 1\n', "text/plain; version=0.0.4"


def test_prometheus_reads_the_targets_and_evaluates_the_alerts(tmp_path: Path) -> None:
    """A service that appears in the file is scraped with the labels of its entry; one that stops answering is down."""
    require_package("prometheus", "prometheus")
    prometheus = observe.Prometheus(tmp_path / "prometheus", scrape_s=1)
    prometheus.start()
    try:

        def query(text: str) -> list[dict[str, dict[str, str]]]:
            answer = httpx.get(f"{prometheus.url}/api/v1/query", params={"query": text}, timeout=60)
            return [one["metric"] for one in answer.json()["data"]["result"]]

        with MetricsServer("127.0.0.1", 0, page, key="rollout_port") as served:
            target = served.url.split("/")[2]
            entry = {"targets": [target], "labels": {"job": "penstock-rollout", "run": "r"}}
            prometheus.targets.write_text(json.dumps([entry]))
            wait_for(lambda: bool(query("up == 1")), "a scrape")
            assert query("up")[0] == {"__name__": "up", "instance": target, "job": "penstock-rollout", "run": "r"}
            assert query("penstock_service_info")[0]["run"] == "r"
        wait_for(lambda: bool(query("up == 0")), "the target to be down")
        groups = httpx.get(f"{prometheus.url}/api/v1/rules", timeout=60).json()["data"]["groups"]
        assert [rule["name"] for rule in groups[0]["rules"]] == [alert.name for alert in ALERTS]
    finally:
        prometheus.stop()


def test_the_targets_are_written_once_the_servers_are_there(tmp_path: Path) -> None:
    """Before the run's own NATS is started there is nothing to ask; then it is asked with the run's own login."""
    assert observe.target_writer(["run.id=r"], tmp_path, tmp_path / "targets.json") is None
    (tmp_path / "store").mkdir()
    seals.write(tmp_path / "store" / "environment", "export PENSTOCK_NATS__URL='nats://h:1'\n")
    writer = observe.target_writer(["run.id=r"], tmp_path, tmp_path / "targets.json")
    assert writer is not None
    assert writer.command[3:] == [
        "penstock.deploy.monitoring.targets", "run.id=r", "--write", str(tmp_path / "targets.json"), "--every", "2",
    ]  # fmt: skip


def test_a_wrong_run_file_is_named_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert observe.main([str(tmp_path / "none.toml"), "--workers", "1"]) == 1
    assert "none.toml" in capsys.readouterr().err
