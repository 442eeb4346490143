"""The events of a run from NATS."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import events
from penstock.client.events import Event
from penstock.console.report import curves
from penstock.protocol import seals
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.transport.bus import Bus
from tests.console.record.recorded_run import Services
from tests.servers import secret_file


@pytest.fixture
def folder(tmp_path: Path, nats_settings: NatsSettings, run_id: str) -> Path:
    """The folder of a run whose run file names the session's NATS."""
    file = tmp_path / run_id / "run.toml"
    file.parent.mkdir()
    password = secret_file(nats_settings.secret())
    seals.write(
        file, f'nats = {{ url = "{nats_settings.url}", user = "{nats_settings.user}", password_file = "{password}" }}\n'
    )
    return file.parent


def next_event(arriving: Iterator[Event | None]) -> Event:
    deadline = time.monotonic() + 20.0
    while (event := next(arriving)) is None:
        assert time.monotonic() < deadline
    return event


def test_events_arrive_from_the_first_one_until_the_run_is_over(bus: Bus, run_streams: str, folder: Path) -> None:
    """What was published before, what comes while it is read, and nothing twice; then it ends by itself."""
    over: list[bool] = []
    services = Services(bus, run_streams)
    services.say_steps(1)
    arriving = events.published(run_streams, folder, lambda: bool(over))
    assert next_event(arriving) == Event("step", "trainer", 1.0, {"step": 1})
    services.say_steps(2)
    assert next_event(arriving).data == {"step": 2}
    services.say_steps(3)
    over.append(True)
    assert [event.data for event in arriving if event is not None] == [{"step": 3}]


def test_a_run_that_ends_before_its_streams_exist_has_no_events(run_id: str, folder: Path) -> None:
    """While there are none the iterator gives None, so that its reader is never stuck; it ends with the run."""
    over: list[bool] = []
    arriving = events.published(run_id, folder, lambda: bool(over))
    assert next(arriving) is None
    over.append(True)
    assert list(arriving) == []


def test_steps_of_a_folder_are_events(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "at": 2.5, "step": 1}\n{"kind": "st')
    assert list(events.recorded(curves.rows(tmp_path))) == [Event("step", "trainer", 2.5, {"step": 1})]
