"""Figures of a foreign trainer go where the run's own go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.console.tracking.metrics_log import log_once
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
