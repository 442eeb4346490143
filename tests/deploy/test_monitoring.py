"""The example of a Prometheus configuration, and the targets of a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.servers import require_package, secret_file

from penstock.deploy.monitoring import targets
from penstock.deploy.monitoring.alerts import ALERTS
from penstock.protocol import heartbeats, streams
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.transport.bus import Bus

FOLDER = Path(targets.__file__).parent


def test_promtool_accepts_the_example() -> None:
    """The configuration and the alerts that it names are valid for the real Prometheus."""
    require_package("promtool", "prometheus")
    file = FOLDER / "prometheus.yml"
    checked = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def beat(service_id: str, url: str | None, state: str = "") -> Heartbeat:
    return Heartbeat(role="rollout", service_id=service_id, at=1.0, state=state, metrics_url=url)


@pytest.mark.parametrize(
    "url",
    [
        None, "", "http://10.0.0.1:1/", "ftp://10.0.0.1:1/metrics", "http://user:pw@10.0.0.1:1/metrics", "http://h/metrics",
        "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "http://a\n:1/metrics", "http://-x:1/metrics",
        'http://a"b:1/metrics', "http://h:1/metrics?x=1", "http://h:123456/metrics",
    ],
)  # fmt: skip
def test_addresses_that_are_not_metrics_of_a_service_are_left_out(url: str | None) -> None:
    """Whoever may write a heartbeat chooses host and port of a target, and nothing else."""
    assert targets.targets([beat("w", url)], "r") == []


def test_the_targets_are_those_of_the_heartbeats(
    bus: Bus, nats_settings: NatsSettings, run_streams: str, tmp_path: Path
) -> None:
    """The file lists each service that serves metrics, by its job and run; one that has exited is gone."""
    live = bus.key_value(streams.live_bucket(run_streams).bucket).wait()
    beats = [
        beat("w1", "http://10.0.0.2:9471/metrics"), beat("w0", "http://[::1]:9/metrics"), beat("w2", None), beat("w4", "https://10.0.0.4:9471/metrics"),
        beat("w3", "http://10.0.0.3:1/metrics", heartbeats.EXITED),
    ]  # fmt: skip
    for one in beats:
        live.put(streams.heartbeat_key("rollout", one.service_id), encode(one), ttl_s=60.0).wait()
    live.put(streams.heartbeat_key("rollout", "junk"), b"\xff", ttl_s=60.0).wait()
    file = tmp_path / "targets" / "run.json"
    nats = nats_settings
    given = [f"run.id={run_streams}", f"nats.url={nats.url}", f"nats.user={nats.user}"]
    assert targets.main([*given, f"nats.password_file={secret_file(nats.secret())}", "--write", str(file)]) == 0
    labels = {"job": "penstock-rollout", "run": run_streams}
    assert json.loads(file.read_text()) == [
        {"targets": ["[::1]:9"], "labels": labels},
        {"targets": ["10.0.0.2:9471"], "labels": labels},
        {"targets": ["10.0.0.4:9471"], "labels": {**labels, "__scheme__": "https"}},
    ]
    assert [path.name for path in file.parent.iterdir()] == ["run.json"]
