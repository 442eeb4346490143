"""Replies of JetStream that cannot be read are tried again, for every call of the bus; a reply that stays so is named."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusError, BusUnreachable
from penstock.protocol.facts import RunEvent, TaskIssued
from penstock.protocol.transport.bus import Bus

_chance = random.Random(3)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "html": lambda _: b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "empty": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "random bytes": lambda _: _chance.randbytes(40),
    "a list": lambda _: b"[]",
    "another object": lambda _: b'{"stream": 3}',
}


FOUND = {"html", "empty", "cut", "random bytes", "a list"}  # another object may have all fields that are read


def calls(bus: Bus, run_id: str) -> dict[str, Callable[[], object]]:
    event = RunEvent(run_id=run_id, source="t", kind="log", at=1.0, data={"text": "x"})
    spec = streams.tasks_consumer(run_id, "train")
    state = bus.key_value(streams.state_bucket(run_id).bucket).wait()
    return {
        "publish": lambda: bus.publish(subjects.events(run_id, "log"), event, msg_id=str(_chance.random())).wait(),
        "stream_state": lambda: bus.stream_state(spec.stream).wait(),
        "consumer_state": lambda: bus.consumer_state(spec).wait(),
        "reset_consumer": lambda: bus.reset_consumer(spec).wait(),
        "stream_names": lambda: bus.stream_names().wait(),
        "store_state": lambda: bus.store_state().wait(),
        "inbox": lambda: bus.inbox(spec, TaskIssued).wait(),
        "key_value": lambda: bus.key_value(streams.state_bucket(run_id).bucket).wait(),
        "state": lambda: state.state().wait(),
        "put": lambda: state.put("k", b"v").wait(),
        "swap": lambda: state.swap(f"k{_chance.random()}", b"v", None).wait(),
        "ensure_stream": lambda: bus.ensure_stream(streams.streams(run_id)[3]).wait(),
        "save_stream": lambda: bus.save_stream(spec.stream, lambda _: None).wait(),
    }


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_reply_that_cannot_be_read_is_no_internal_error(
    bus: Bus, run_streams: str, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """A read or a publication succeeds by its next try; a write that may have happened is BusUnreachable, with an excerpt."""
    left = [0]
    request = Client.request

    async def damaged(self: Client, *args: Any, **options: Any) -> Msg:
        msg = await request(self, *args, **options)
        if left[0]:
            left[0] -= 1
            msg.data = DAMAGE[damage](msg.data)
        return msg

    monkeypatch.setattr(Client, "request", damaged)
    for name, call in calls(bus, run_streams).items():
        left[0] = 1
        if name in {"put", "swap", "save_stream"}:
            with (
                pytest.raises(BusUnreachable, match="cannot be read")
                if damage in FOUND
                else contextlib.suppress(BusUnreachable)
            ):
                call()
        else:
            call()
        assert left == [0], name
    monkeypatch.setattr("penstock.protocol.transport.stream_admin.REQUEST_S", 0.3)
    left[0] = 10_000
    with pytest.raises(BusError, match="cannot be read"):
        bus.stream_state(f"{run_streams}-tasks").wait()
