"""The event stream: from the run's own stream on NATS, resumable by number, bounded, ended when the server stops."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.console.command import server_arguments
from tests.console.record.recorded_run import Services
from tests.console.web.control.api import Api
from tests.servers import wait_for

from penstock.console.web import event_routes
from penstock.console.web.access import Role
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.transport.bus import Bus


@pytest.fixture
def served(tmp_path: Path, nats_settings: NatsSettings, run_streams: str) -> Iterator[tuple[Api, str, str]]:
    """An app on a real server, its URL, and a run with a folder; the server is stopped after the test."""
    folder = tmp_path / "runs"
    (folder / run_streams).mkdir(parents=True)
    (folder / run_streams / "metrics.jsonl").touch()
    api = Api(folder, *server_arguments(nats_settings), environ={})
    with api.served():
        yield api, api.url, run_streams


@contextmanager
def stream(served: tuple[Api, str, str], query: str = "", **headers: str) -> Iterator[Iterator[dict[str, str]]]:
    api, url, run = served
    sent = {"authorization": f"Bearer {api.tokens[Role.READ]}", **headers}
    with httpx.stream("GET", f"{url}/v1/runs/{run}/events{query}", headers=sent, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield parsed(answer.iter_lines())


def parsed(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif fields:
            yield fields
            fields = {}


def take(events: Iterator[dict[str, str]], count: int, kind: str = "run") -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for event in events:
        if event.get("event") == kind:
            found.append(event)
        if len(found) == count:
            break
    return found


def test_events_arrive_in_order_and_go_on_after_the_last_one_seen(served: tuple[Api, str, str], bus: Bus):
    """The id is the number in the stream; a client that comes back gets what follows, and nothing twice."""
    Services(bus, served[2]).say_steps(1, 2, 3)
    with stream(served, "?after=0") as events:
        first = next(events)
        assert (first["event"], json.loads(first["data"])["state"]) == ("state", "stopped")
        seen = take(events, 2)
    assert [event["id"] for event in seen] == ["1", "2"]
    first_event = {"sequence": 1, "kind": "step", "source": "trainer", "at": 1.0, "data": {"step": 1}}
    assert json.loads(seen[0]["data"]) == first_event
    Services(bus, served[2]).say_steps(4)
    with stream(served, **{"last-event-id": "2"}) as events:
        assert [event["id"] for event in take(events, 2)] == ["3", "4"]


def test_a_new_client_gets_what_is_new(served: tuple[Api, str, str], bus: Bus, monkeypatch: pytest.MonkeyPatch):
    Services(bus, served[2]).say_steps(1)
    began = threading.Event()
    original = event_routes._Reading._start
    monkeypatch.setattr(event_routes._Reading, "_start", lambda self, run: (original(self, run), began.set()))
    with stream(served) as events:
        next(events)
        assert began.wait(60.0)
        Services(bus, served[2]).say_steps(2)
        assert [event["id"] for event in take(events, 1)] == ["2"]


def test_a_number_that_the_stream_does_not_have_is_a_gap(served: tuple[Api, str, str], bus: Bus):
    Services(bus, served[2]).say_steps(1)
    with stream(served, **{"last-event-id": "77"}) as events:
        found = [next(events), next(events), next(events)]
    assert [event["event"] for event in found] == ["state", "gap", "run"]
    assert json.loads(found[1]["data"]) == {"after": 77, "next": 1}


def test_a_long_history_passes_through_a_small_queue(
    served: tuple[Api, str, str], bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    """Reading from NATS waits while the client has not taken what came before."""
    monkeypatch.setattr(event_routes, "MAX_WAITING", 3)
    Services(bus, served[2]).say_steps(*range(1, 41))
    with stream(served, "?after=0") as events:
        assert [int(event["id"]) for event in take(events, 40)] == list(range(1, 41))


def test_a_client_that_takes_nothing_is_disconnected(
    bus: Bus, served: tuple[Api, str, str], monkeypatch: pytest.MonkeyPatch
):
    """What one client may be behind is bounded; it comes back with the number of its last event."""
    monkeypatch.setattr(event_routes, "MAX_WAITING", 3)
    monkeypatch.setattr(event_routes, "_SLOW_S", 0.05)
    Services(bus, served[2]).say_steps(*range(1, 10))
    api, _, run = served
    one = event_routes._Stream(api.context, api.folder / run, 0)
    try:
        one._begin()
        reading = one._reading
        assert reading is not None
        wait_for(lambda: reading.is_behind, "the client to be too slow")
        assert [event.id for event in one._new_events()] == ["1", "2", "3"]
        assert one.is_over
    finally:
        one.close()


@pytest.mark.parametrize(("limit", "of_others"), [("MAX_STREAMS", 429), ("MAX_STREAMS_OF_TOKEN", 200)])
def test_open_streams_are_counted(
    served: tuple[Api, str, str], monkeypatch: pytest.MonkeyPatch, limit: str, of_others: int
):
    """One too many is refused with 429, of all or of one token; when one ends, its place is free."""
    monkeypatch.setattr(event_routes, limit, 1)
    api, url, run = served
    headers = {"authorization": f"Bearer {api.tokens[Role.READ]}"}
    with stream(served) as events:
        next(events)
        refused = httpx.get(f"{url}/v1/runs/{run}/events", headers=headers)
        assert (refused.status_code, refused.json()["fix"].split(",")[0]) == (429, "close one")
        assert _status(url, run, {"authorization": f"Bearer {api.tokens[Role.ADMIN]}"}) == of_others
    wait_for(lambda: _status(url, run, headers) == 200, "the place to be free")


def _status(url: str, run: str, headers: dict[str, str]) -> int:
    with httpx.stream("GET", f"{url}/v1/runs/{run}/events", headers=headers, timeout=60) as answer:
        return answer.status_code


def test_a_server_that_stops_ends_its_streams_first(tmp_path: Path, nats_settings: NatsSettings):
    """Uvicorn alone would wait for an open stream, perhaps without end; and a run without NATS has a stream too."""
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    api = Api(folder, "nats.url=nats://127.0.0.1:9", environ={})
    with api.served():
        headers = {"authorization": f"Bearer {api.tokens[Role.READ]}"}
        with httpx.stream("GET", f"{api.url}/v1/runs/one/events", headers=headers, timeout=60) as answer:
            events = parsed(answer.iter_lines())
            assert json.loads(next(events)["data"])["state"] == "stopped"
            api.context.closing.set()
            assert list(events) == []
