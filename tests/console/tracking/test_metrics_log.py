"""Figures of a foreign trainer go where the run's own go."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.console.web.control.api import Api

import penstock
from penstock.console.tracking import metrics_log
from penstock.console.tracking.metrics_log import log_once
from penstock.console.web.access import Role
from penstock.deploy.bootstrap import bootstrap
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import ConfigError, MissingStream
from penstock.protocol.facts import RunEvent
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


@pytest.fixture(autouse=True)
def login(nats_settings: NatsSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user and password of the test server, as a container has them."""
    monkeypatch.setenv("PENSTOCK_NATS__USER", nats_settings.user)
    monkeypatch.setenv("PENSTOCK_NATS__PASSWORD", nats_settings.secret())


def _events(bus: Bus, run: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    found: list[RunEvent] = []
    stream = streams.stream_name(run, "events")
    bus.tail(stream, subjects.events(run), RunEvent, found.append, from_start=True).wait()
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return [(one.kind, dict(one.data)) for one in found]


def test_three_lines_log_to_a_run(bus: Bus, blobs: Blobs, run_id: str, tmp_path: Path) -> None:
    """Each call is an event, what is not finite is left out, and the end of the block is the end of the run."""
    bootstrap(bus, blobs, run_id)
    servers = (f"nats.url={bus.url}", f"run.dir={tmp_path}")
    with penstock.MetricsLog(run_id, *servers) as metrics:
        metrics.log(1, {"train/loss": 0.5, "train/nan": float("nan")})
        with pytest.raises(ConfigError, match="expected a number"):
            metrics.log(2, {"train/loss": "0.5"})  # pyright: ignore[reportArgumentType]
    assert log_once(run_id, 3, [*servers, "train/loss=0.25", "lr=1e-6"]) == 0
    assert _events(bus, run_id, 3) == [
        ("metrics", {"step": 1, "values": {"train/loss": 0.5}}),
        ("state", {"text": "finished", "finished": True}),
        ("metrics", {"step": 3, "values": {"train/loss": 0.25, "lr": 1e-6}}),
    ]


def test_a_run_that_was_never_created_is_refused_with_the_command(bus: Bus, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(MissingStream, match="bootstrap"):
        penstock.MetricsLog(run_id, f"nats.url={bus.url}", f"run.dir={tmp_path}")


@pytest.mark.parametrize("arguments", [["train/loss=high"], ["nats.url=nats://127.0.0.1:1"]])
def test_what_is_no_figure_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="NAME=NUMBER"):
        log_once("r", 1, arguments)


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    api = Api(tmp_path / "runs")
    monkeypatch.setenv("PENSTOCK_CONSOLE_TOKEN", api.tokens[Role.LOG])
    with api.served():
        yield api


def test_a_script_is_a_run_of_the_console_and_a_stopped_console_loses_nothing(console: Api) -> None:
    """By the calls of the platform guide; its rows and checkpoints are read at the guide's paths."""
    logger = penstock.init_logging("My_Job 1", platform_url=console.url, wandb_config={"lr": 1e-6, "to": math.nan})
    for step in range(40):
        if step in {10, 20, 30}:
            console.stop()
        logger.log_metrics(step, {"policy_loss": 0.5 - step / 100, "bad": math.nan}, epoch=0)
        if step in {12, 22, 32}:
            time.sleep(1.2)  # events wait
            console.start()
    logger.log_gpu_usage(0, 92.5, 65.0, 80.0)
    logger.log_checkpoint(39, "checkpoints/39", {"gsm8k": 0.5})
    with pytest.raises(ConfigError, match="expected a number"):
        logger.log_metrics(40, {"loss": "0.5"})  # pyright: ignore[reportArgumentType]
    logger.log_summary({"best": 0.5})
    assert console.client().get("/v1/runs/my-job-1").json()["state"] == "running"
    logger.finish()
    assert logger.num_lost == 0
    client = console.client(Role.READ)
    rows = client.get("/api/jobs/my-job-1/metrics").json()
    assert [row["step"] for row in rows] == list(range(40))
    wanted = {"policy_loss": 0.11, "epoch": 0.0, "gpu/0/utilization": 92.5, "eval/gsm8k": 0.5, "summary/best": 0.5}
    assert {name: rows[-1].get(name) for name in wanted} == pytest.approx(wanted)
    assert "bad" not in rows[0]
    [kept] = client.get("/api/jobs/my-job-1/checkpoints").json()
    assert (kept["step"], kept["path"], kept["eval_results"]) == (39, "checkpoints/39", {"gsm8k": 0.5})
    assert client.get("/v1/runs/my-job-1/config").json()["settings"] == {"config": {"lr": 1e-6, "to": "NaN"}}
    assert [(one["run"], one["state"], one["step"]) for one in client.get("/v1/runs").json()] == [
        ("my-job-1", "finished", 39)
    ]
    found = client.get("/v1/runs/my-job-1/summary").json()
    assert (found["kind"], found["step"], found["state"]) == ("log", 39, "finished")
    assert console.client().delete("/v1/runs/my-job-1").status_code == 204
    assert not (console.folder / "my-job-1").exists()


def test_what_one_event_has_costs_no_other(console: Api) -> None:
    """Long texts, many figures, bytes that are no text, a large outage, a forked process, figures after the end."""
    logger = penstock.DualLogger("job", console.url)
    console.stop()
    for step in range(600):
        logger.log_metrics(step, {f"f{number}": 1.0 for number in range(301 if step == 7 else 60)})
    logger.log_checkpoint(1, os.fsdecode(b"/ckpt/\xff"))
    logger.log_config({"path": os.fsdecode(b"\xff")})
    logger.log_metrics(600, {"": 1.0})  # the console refuses it
    with pytest.raises(ConfigError, match="expected a number"):
        logger.log_metrics(601, {"loss": 10**400})
    if not (child := os.fork()):
        logger.log_metrics(602, {"loss": 1.0})
        os._exit(logger.num_lost)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    console.start()
    logger.log_status("failed", "x" * 3000)
    logger.log_summary({"best": 1.0})
    logger.finish()
    assert logger.num_lost == 1
    rows = console.client(Role.READ).get("/api/jobs/job/metrics").json()
    assert [row["step"] for row in rows] == list(range(601))
    stored = map(
        json.loads, filter(str.strip, (console.folder / "job/log-training/metrics.jsonl").read_text().splitlines())
    )
    assert len({name for row in stored if row["step"] == 7 for name in row if name.startswith("f")}) == 301
    assert console.client(Role.READ).get("/v1/runs/job").json()["state"] == "failed"
    assert console.client(Role.READ).get("/v1/runs/job/config").status_code == 200


def test_what_the_console_refuses_is_said_at_once(console: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    (console.folder / "trained").mkdir()
    with pytest.raises(ConfigError, match="not one of a script"):
        penstock.DualLogger("trained", console.url)
    deep: dict[str, Any] = {}
    for _ in range(30):
        deep = {"a": deep}
    for bad in (
        {"step": 1, "values": {"loss": "high"}},
        {"kind": "config", "values": deep},
        {"kind": "config", "values": {"a": "\ud800"}},
    ):
        body = json.dumps({"events": [bad]})
        assert console.client(Role.LOG).post("/v1/runs/other/metrics", content=body).status_code == 422, bad
    post = console.client(Role.LOG).post
    assert post("/v1/runs/mine/metrics", json={"events": []}).status_code == 204
    (console.folder / "mine" / "log-training" / "logged-with.json").write_text('{"token": "another"}')
    assert post("/v1/runs/mine/metrics", json={"events": []}).status_code == 403
    (console.folder / "mine" / "config.json").write_text("{}")
    assert post("/v1/runs/mine/metrics", json={"events": []}).status_code == 409
    assert console.client(Role.READ).get("/api/jobs/metrics").status_code == 404
    monkeypatch.delenv("PENSTOCK_CONSOLE_TOKEN")
    with pytest.raises(ConfigError, match="set PENSTOCK_CONSOLE_TOKEN"):
        penstock.DualLogger("job", console.url)


def test_a_console_that_never_answers_costs_the_script_its_events_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "_CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free once it is closed
    with structlog.testing.capture_logs() as said:
        logger = penstock.DualLogger("job", f"http://127.0.0.1:{port}")
        logger.log_status("failed", "out of memory")
        logger.finish()
    assert logger.num_lost == 1
    assert said[-1]["event"] == "events not stored"
