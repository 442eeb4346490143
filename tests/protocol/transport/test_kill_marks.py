"""A message that was in progress when two readers were killed is dead-lettered; one that was only returned is not."""

from __future__ import annotations

import pytest
from tests.protocol.transport.test_bus import dead_letters, issue, take_one, task_inbox
from tests.servers import wait_for

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import _killed

SHORT = StreamLimits(ack_wait_s=0.4)


@pytest.fixture
def run(bus: Bus, blobs: Blobs, run_id: str) -> str:
    """A run with one task, whose messages are redelivered soon after their reader ended."""
    bootstrap(bus, blobs, run_id, SHORT)
    issue(bus, run_id, 1)
    return run_id


def _take_and_die(nats: NatsSettings, run: str) -> int:
    """Take the message and end the connection without a word, as a reader that is killed does."""
    with Bus.connect(nats, name="reader") as reader:
        return take_one(task_inbox(reader, run, SHORT)).num_delivered


def test_the_third_reader_does_not_get_it(bus: Bus, run: str, nats_settings: NatsSettings) -> None:
    """After two readers that were killed with it, the message is a dead letter that names its groups, and leaves the queue."""
    assert [_take_and_die(nats_settings, run) for _ in range(2)] == [1, 2]
    inbox = task_inbox(bus, run, SHORT)
    wait_for(
        lambda: inbox.fetch(1, 0.2).wait() or bus.stream_state(f"{run}-tasks").wait().num_messages == 0,
        "an empty queue",
    )
    assert inbox.num_held == 0
    letters = dead_letters(bus, run, 1)
    assert [(letter.reason, letter.stage, letter.group_ids) for letter in letters] == [
        ("ReaderKilled", "tasks", ("e0.p1.a0",))
    ]


def test_returns_and_one_killed_reader_quarantine_nothing(bus: Bus, run: str, nats_settings: NatsSettings) -> None:
    """A message that was returned in order any number of times, and present when one reader was killed, is processed."""
    for _ in range(2):
        take_one(task_inbox(bus, run, SHORT)).give_back(0.0).wait()
    assert _take_and_die(nats_settings, run) == 3
    take_one(task_inbox(bus, run, SHORT)).give_back(0.0).wait()
    again = take_one(task_inbox(bus, run, SHORT))
    assert again.num_delivered == 5
    again.ack().wait()
    marks = bus.key_value(streams.scoring_bucket(run).bucket).wait()
    wait_for(lambda: not marks.entries("started.").wait(), "the mark to be deleted")


HOSTILE = {
    "infinite": b'{"killed": Infinity, "started": false}',
    "not a number": b'{"killed": NaN, "started": false}',
    "negative": b'{"killed": -1000000, "started": false}',
    "more than are counted": b'{"killed": 3, "started": true}',
    "a fraction": b'{"killed": 1.5, "started": false}',
    "text": b'{"killed": "1", "started": false}',
    "a truth": b'{"killed": true, "started": false}',
    "no truth": b'{"killed": 0, "started": 7}',
    "nested": b"[" * 100_000,
    "no object": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_mark_that_is_none_counts_as_one_killed_reader(what: str) -> None:
    """A login of the role may write anything there: no value ends a reader, or keeps a message from being quarantined."""
    assert _killed(HOSTILE[what]) == 1


def test_a_hostile_mark_neither_ends_nor_starves_a_reader(bus: Bus, run: str, nats_settings: NatsSettings) -> None:
    assert _take_and_die(nats_settings, run) == 1
    marks = bus.key_value(streams.scoring_bucket(run).bucket).wait()
    marks.put(streams.kill_mark_key("tasks", 1), HOSTILE["infinite"]).wait()
    delivery = take_one(task_inbox(bus, run, SHORT))
    marks.put(streams.kill_mark_key("tasks", 1), HOSTILE["nested"]).wait()
    delivery.give_back(0.0).wait()
    take_one(task_inbox(bus, run, SHORT)).ack().wait()
