"""A real Prometheus scrapes a real reward service, and promtool accepts the page of every service."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deploy.processes.servers import free_port
from penstock.protocol import streams
from penstock.protocol.facts import Heartbeat, decode
from penstock.protocol.metrics import exposition
from penstock.protocol.metrics.table import METRICS, Histogram, LabelValues, Samples
from penstock.protocol.metrics.table import Service as ServiceName
from tests import servers
from tests.groups import make_group
from tests.reward_service.conftest import Wire, start_endpoint, start_service, wire  # noqa: F401  fixtures
from tests.reward_service.processes import Behaviour, EndpointServer, Service, good


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], str]]:
    """Start a Prometheus with one scrape job; returns its URL."""
    servers.require_package("prometheus", "prometheus")
    started: list[subprocess.Popen[bytes]] = []

    def start(job: dict[str, Any]) -> str:
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        file = tmp_path / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
        address = f"127.0.0.1:{free_port()}"
        with (tmp_path / "prometheus.log").open("wb") as log:
            command = ["prometheus", f"--config.file={file}", f"--web.listen-address={address}"]
            started.append(subprocess.Popen([*command, f"--storage.tsdb.path={tmp_path / 'tsdb'}"], stderr=log))
        return f"http://{address}"

    yield start
    for process in started:
        process.terminate()
        process.wait(60.0)


def query(url: str, expression: str) -> dict[str, float]:
    """Return the values of an instant query by the label ``endpoint``; empty while Prometheus is not ready."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=60)
    except httpx.TransportError:
        return {}
    if answer.status_code != 200:
        return {}
    return {one["metric"].get("endpoint", ""): float(one["value"][1]) for one in answer.json()["data"]["result"]}


def test_prometheus_scrapes_a_reward_service_with_its_token(
    wire: Wire,  # noqa: F811
    start_service: Callable[..., Service],  # noqa: F811
    start_endpoint: Callable[[Behaviour], EndpointServer],  # noqa: F811
    prometheus: Callable[[dict[str, Any]], str],
) -> None:
    """Counters, histogram and version come back from Prometheus' own API, equal to the heartbeat in NATS."""
    token = servers.secret_file("secret")
    service = start_service(f"reward_service.token_file={token}")
    name = f"mine-{wire.run_id}"
    assert service.register(name, start_endpoint(good(0.5)).url, token="secret").status_code == 201
    assert service.post(f"/v1/endpoints/{name}/test", {}, token="secret").json()["ok"] is True
    wire.announce([make_group("e0.p0.a0", size=4)])
    wire.wait_scored("e0.p0.a0")
    url = prometheus(
        {
            "job_name": "penstock-reward",
            "authorization": {"credentials_file": str(token)},
            "static_configs": [{"targets": [service.url.removeprefix("http://")]}],
        }
    )
    servers.wait_for(lambda: query(url, "penstock_groups_total{outcome='scored'}") == {"": 1.0}, "a scrape")
    assert query(url, "up") == {"": 1.0}
    assert query(url, f"penstock_reward_request_seconds_count{{outcome='ok',endpoint='{name}'}}") == {name: 1.0}
    p99 = query(url, "histogram_quantile(0.99, penstock_reward_request_seconds_bucket{outcome='ok'})")
    assert 0 < p99[name] < 30
    assert query(url, "sum(penstock_service_info{role='reward', run='" + wire.run_id + "'})") == {"": 1.0}

    live = wire.bus.key_value(streams.live_bucket(wire.run_id).bucket).wait()
    entry = live.get(streams.heartbeat_key("reward", f"r0-{wire.run_id}")).wait()
    assert entry is not None
    beat = decode(entry.value, Heartbeat)
    assert beat.metrics_url == f"{service.url}/metrics"
    assert beat.figures["groups_scored"] == 1.0
    at = query(url, "penstock_heartbeat_timestamp_seconds")[""]
    assert 0 <= time.time() - at < 60


@pytest.mark.parametrize("service", ["trainer", "rollout", "reward"])
def test_promtool_finds_nothing_wrong_with_any_metric(service: ServiceName) -> None:
    """Names, types, units and help of every metric of the table pass Prometheus' own linter."""
    servers.require_package("promtool", "prometheus")
    samples = Samples(service, LabelValues())
    for metric in METRICS.values():
        if service in metric.services:
            labels = dict.fromkeys(metric.labels, 'a"b\\c\n')
            values = {"histogram": Histogram(metric.buckets), "summary": {"0.5": 1.0, "sum": 2.0, "count": 2.0}}
            samples.add(metric.name, values.get(metric.kind, 1.5), **labels)
    page, _ = exposition.page(samples, "")
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr.decode()) == (0, "")
