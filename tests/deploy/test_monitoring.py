"""The example of a Prometheus configuration, and the targets of a run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.console.command import server_arguments
from tests.servers import require_package

from penstock.deploy.certificates import hosts_of
from penstock.deploy.make_secrets import make_secrets
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


def test_promtool_accepts_the_configuration_of_compose(tmp_path: Path) -> None:
    """With the files that compose mounts, where it mounts them; jobs verify the certificates of make_secrets."""
    require_package("promtool", "prometheus")
    make_secrets(tmp_path / "secrets")
    document = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())
    service = document["services"]["prometheus"]
    mounted = dict(reversed(one.removesuffix(":ro").split(":")) for one in service["volumes"])
    mounted |= {f"/run/secrets/{one}": document["secrets"][one]["file"] for one in service["secrets"]}
    for kind, target in (("config", "/etc/prometheus/prometheus.yml"), ("web-config", "/etc/prometheus/web.yml")):
        text = (FOLDER.parent / mounted[target]).read_text().replace("rules.yml", str(FOLDER / "rules.yml"))
        for inside, source in mounted.items():
            outside = (tmp_path if "secrets" in source else FOLDER.parent) / source
            text = re.sub(rf"(?<= ){re.escape(inside)}(?=[ ,])", str(outside), text)
        (tmp_path / "checked.yml").write_text(text)
        command = ["promtool", "check", kind, str(tmp_path / "checked.yml")]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert f"{len(ALERTS)} rules found" in checked.stdout or kind == "web-config"
    for job in yaml.safe_load((FOLDER / "compose" / "prometheus.yml").read_text())["scrape_configs"]:
        name = job["tls_config"]["server_name"]
        assert name in hosts_of(tmp_path / "secrets" / "tls" / f"{name}.pem")


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    """What its provisioning files name is mounted in its container, and is Prometheus' address there."""
    services = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]
    mounted = dict(reversed(one.removesuffix(":ro").split(":")) for one in services["grafana"]["volumes"])
    (source,) = yaml.safe_load((FOLDER / "compose" / "datasources.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    host, port = source["url"].removeprefix("https://").split(":")
    assert f":{port}" in services[host]["ports"][0]
    authority = re.fullmatch(r"\$__file\{(.+)\}", source["secureJsonData"]["tlsCACert"])
    assert authority is not None
    assert mounted[authority[1]].endswith("ca.pem")
    (provider,) = yaml.safe_load((FOLDER / "compose" / "dashboards.yml").read_text())["providers"]
    assert list((FOLDER.parent / mounted[provider["options"]["path"]]).glob("*.json"))
    for file in ("datasources", "dashboards"):
        assert mounted[f"/etc/grafana/provisioning/{file}/penstock.yml"] == f"./monitoring/compose/{file}.yml"


def beat(service_id: str, url: str | None, state: str = "") -> Heartbeat:
    return Heartbeat(role="rollout", service_id=service_id, at=1.0, state=state, metrics_url=url)


def test_a_file_that_cannot_be_written_is_named(
    bus: Bus, nats_settings: NatsSettings, run_streams: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    file = tmp_path / "taken" / "run.json"
    given = [f"run.id={run_streams}", *server_arguments(nats_settings)]
    assert targets.main([*given, "--write", str(file)]) == 1
    assert f"{file}: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        None, "", "http://10.0.0.1:1/", "ftp://10.0.0.1:1/metrics", "http://user:pw@10.0.0.1:1/metrics",
        "http://h/metrics", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "http://a\n:1/metrics",
        "http://-x:1/metrics",
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
        beat("w1", "http://10.0.0.2:9471/metrics"), beat("w0", "http://[::1]:9/metrics"), beat("w2", None),
        beat("w4", "https://10.0.0.4:9471/metrics"), beat("w3", "http://10.0.0.3:1/metrics", heartbeats.EXITED),
    ]  # fmt: skip
    for one in beats:
        live.put(streams.heartbeat_key("rollout", one.service_id), encode(one), ttl_s=60.0).wait()
    live.put(streams.heartbeat_key("rollout", "junk"), b"\xff", ttl_s=60.0).wait()
    file = tmp_path / "targets" / "run.json"
    given = [f"run.id={run_streams}", *server_arguments(nats_settings)]
    assert targets.main([*given, "--write", str(file)]) == 0
    labels = {"job": "penstock-rollout", "run": run_streams}
    assert json.loads(file.read_text()) == [
        {"targets": ["[::1]:9"], "labels": labels},
        {"targets": ["10.0.0.2:9471"], "labels": labels},
        {"targets": ["10.0.0.4:9471"], "labels": {**labels, "__scheme__": "https"}},
    ]
    assert [path.name for path in file.parent.iterdir()] == ["run.json"]
