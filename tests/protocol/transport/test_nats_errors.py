"""Refusals of NATS are errors that name the stream or bucket, the limit and the fix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.js import api
from nats.js.errors import APIError
from tests import servers
from tests.groups import make_task_issued

from penstock.deploy.processes.servers import NatsServer
from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusError, BusRefused, BusUnreachable, MissingStream, PenstockError, StorageFull
from penstock.protocol.facts import TaskIssued
from penstock.protocol.streams import BucketSpec, StreamSpec
from penstock.protocol.transport import store_errors
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.nats_connection import refusal


@pytest.fixture
def small_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server whose store takes 10 MB."""
    server = servers.start_nats(tmp_path, max_store_gb=0.01)
    yield server
    server.stop()


def test_a_full_bucket_is_an_error_with_its_size_and_loses_nothing(bus: Bus, run_id: str) -> None:
    """A new key is refused by name, limit and remedy; old keys remain writable, and with more space the key is accepted."""
    js = bus._connection.js
    name = f"{run_id}-small"
    config = api.KeyValueConfig(bucket=name, max_bytes=2000, direct=True)
    bus._connection.call(js.create_key_value(config), "create").wait()
    bucket = bus.key_value(name).wait()
    keys = [f"k{number}" for number in range(20)]
    written: list[str] = []

    def fill() -> None:
        for key in keys:
            bucket.put(key, b"x" * 200).wait()
            written.append(key)

    before = store_errors.counts()["nats", "full"]
    with pytest.raises(StorageFull) as refused:
        fill()
    assert store_errors.counts()["nats", "full"] == before + 1
    text = str(refused.value)
    for part in (name, f"k{len(written)}", "maximum bytes exceeded", "of its 2000 bytes", "--max-bytes", f"KV_{name}"):
        assert part in text
    with pytest.raises(StorageFull):
        bucket.swap("other", b"x" * 200, None).wait()
    found = {entry.key: entry.value for entry in bucket.entries().wait()}
    assert found == dict.fromkeys(written, b"x" * 200)
    bucket.put("k0", b"y" * 200).wait()  # replacing the existing one
    wider = bus._connection.call(js.stream_info(f"KV_{name}"), "look").wait().config
    bus._connection.call(js.update_stream(wider.evolve(max_bytes=4000)), "widen").wait()
    bucket.put(keys[len(written)], b"x").wait()
    bus.delete_stream(f"KV_{name}").wait()


def test_a_store_without_space_for_a_run_is_an_error(small_nats: NatsServer, run_id: str) -> None:
    """Error 10047: streams and buckets that reserve more than the store has are refused with the limit to raise."""
    with Bus.connect(small_nats.settings, name="test") as bus:
        for create in (
            lambda: bus.ensure_stream(StreamSpec(run_id, (f"{run_id}.>",), "limits", 10, 512 * 1024 * 1024)).wait(),
            lambda: bus.ensure_bucket(BucketSpec(f"{run_id}-large")).wait(),
        ):
            with pytest.raises(StorageFull, match=rf"{run_id}.*10047.*penstock runs rm RUN.*max_file_store"):
                create()


@pytest.mark.parametrize("what", ["consumer", "stream"])
def test_a_message_of_a_deleted_consumer_or_stream_is_named_within_seconds(
    bus: Bus, run_streams: str, what: str
) -> None:
    spec = streams.tasks_consumer(run_streams, "train")
    inbox = bus.inbox(spec, TaskIssued).wait()
    bus.publish(subjects.tasks(run_streams, "train"), make_task_issued(run_id=run_streams), msg_id="t").wait()
    (held,) = inbox.fetch(1, 30.0).wait()
    js, started = bus._connection.js, time.monotonic()
    deleting = js.delete_consumer(spec.stream, spec.durable) if what == "consumer" else js.delete_stream(spec.stream)
    bus._connection.call(deleting, "delete").wait()
    with pytest.raises(MissingStream, match=rf"{spec.stream} has no consumer {spec.durable}; create it"):
        held.ack().wait()
    assert time.monotonic() - started < 20.0


def test_streams_with_the_same_subjects_are_refused(bus: Bus, run_id: str) -> None:
    bus.ensure_stream(StreamSpec(run_id, (f"{run_id}.>",), "limits", 10, 1024)).wait()
    with pytest.raises(BusError, match=rf"{run_id}-too.*10065.*another stream has these subjects"):
        bus.ensure_stream(StreamSpec(f"{run_id}-too", (f"{run_id}.a",), "limits", 10, 1024)).wait()
    bus.delete_stream(run_id).wait()


def test_a_request_that_the_server_does_not_understand_is_our_error(bus: Bus, run_id: str) -> None:
    with pytest.raises(PenstockError, match=rf"stream {run_id}.*NATS at nats://.* says: .*error 100\d\d"):
        bus.ensure_stream(StreamSpec(run_id, ("a..b",), "limits", 10, 1024)).wait()


@pytest.mark.parametrize(
    ("code", "number", "kind", "says"),
    [
        (400, 10002, StorageFull, "max_file_store and max_mem_store"),
        (503, 10023, StorageFull, "max_file_store"),
        (400, 10026, StorageFull, "max_consumers"),
        (400, 10027, StorageFull, "max_streams"),
        (503, 10008, BusUnreachable, "try again"),
        (503, 10039, BusRefused, "enable JetStream"),
        (400, 10003, BusError, "2.12"),
        (400, 10013, BusError, "remove it"),
        (404, 19999, MissingStream, "penstock bootstrap"),
        (500, 19999, BusError, "error 19999"),
    ],
)
def test_every_refusal_is_a_penstock_error(code: int, number: int, kind: type[BusError], says: str) -> None:
    """Each code becomes an error that callers handle, whose text names request, server and fix."""
    err = refusal(APIError(code=code, err_code=number, description="no"), "stream r-tasks", "nats://h:1")
    assert type(err) is kind
    assert str(err).startswith(f"stream r-tasks: NATS at nats://h:1 says: no (error {number})")
    assert says in str(err)
