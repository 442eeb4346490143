"""A message that was in progress when two readers were killed is dead-lettered; one that was only returned is not."""

from __future__ import annotations

import pytest
from tests.groups import make_task, make_task_issued
from tests.servers import wait_for

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.facts import DeadLetter, TaskIssued
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery, _killed
from penstock.protocol.transport.inbox import Inbox

SHORT = StreamLimits(ack_wait_s=0.4)


@pytest.fixture
def run(bus: Bus, blobs: Blobs, run_id: str) -> str:
    """A run with one task, whose messages are redelivered soon after their reader ended."""
    bootstrap(bus, blobs, run_id, SHORT)
    fact = make_task_issued(run_id, "p1", [make_task("e0.p1.a0")])
    bus.publish(subjects.tasks(run_id, "train"), fact, msg_id="p1").wait()
    return run_id


def _inbox(bus: Bus, run: str) -> Inbox[TaskIssued]:
    return bus.inbox(streams.tasks_consumer(run, "train", SHORT), TaskIssued).wait()


def _take(inbox: Inbox[TaskIssued]) -> Delivery[TaskIssued]:
    found: list[Delivery[TaskIssued]] = []
    wait_for(lambda: found.extend(inbox.fetch(1, 0.5).wait()) or found, "a message")
    return found[0]


def _take_and_die(nats: NatsSettings, run: str) -> int:
    """Take the message and end the connection without a word, as a reader that is killed does."""
    with Bus.connect(nats, name="reader") as reader:
        return _take(_inbox(reader, run)).num_delivered


def test_the_third_reader_does_not_get_it(bus: Bus, run: str, nats_settings: NatsSettings) -> None:
    """After two readers that were killed with it, the message is a dead letter that names its groups, and leaves the queue."""
    letters: list[DeadLetter] = []
    bus.tail(f"{run}-dead", subjects.dead(run), DeadLetter, letters.append, from_start=True).wait()
    assert [_take_and_die(nats_settings, run) for _ in range(2)] == [1, 2]
    inbox = _inbox(bus, run)
    wait_for(lambda: inbox.fetch(1, 0.2).wait() or letters, "the dead letter")
    assert [(letter.reason, letter.stage, letter.group_ids) for letter in letters] == [
        ("ReaderKilled", "tasks", ("e0.p1.a0",))
    ]
    wait_for(lambda: bus.stream_state(f"{run}-tasks").wait().num_messages == 0, "an empty queue")
    assert inbox.num_held == 0


def test_returns_and_one_killed_reader_quarantine_nothing(bus: Bus, run: str, nats_settings: NatsSettings) -> None:
    """A message that was returned in order any number of times, and present when one reader was killed, is processed."""
    for _ in range(2):
        _take(_inbox(bus, run)).give_back(0.0).wait()
    assert _take_and_die(nats_settings, run) == 3
    _take(_inbox(bus, run)).give_back(0.0).wait()
    again = _take(_inbox(bus, run))
    assert again.num_delivered == 5
    again.ack().wait()
    marks = bus.key_value(streams.scoring_bucket(run).bucket).wait()
    wait_for(lambda: not marks.entries("started.").wait(), "the mark to be deleted")


def test_a_message_of_another_run_is_a_dead_letter(bus: Bus, run: str) -> None:
    letters: list[DeadLetter] = []
    bus.tail(f"{run}-dead", subjects.dead(run), DeadLetter, letters.append, from_start=True).wait()
    foreign = make_task_issued(f"{run}x", "p2", [make_task("e0.p2.a0")])
    bus.publish(subjects.tasks(run, "train"), foreign, msg_id="p2").wait()
    inbox, found = _inbox(bus, run), list[Delivery[TaskIssued]]()
    wait_for(lambda: found.extend(inbox.fetch(2, 0.2).wait()) or letters or len(found) > 1, "the dead letter")
    assert [delivery.fact.run_id for delivery in found] == [run]
    assert [letter.reason for letter in letters] == ["MalformedFact"]


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
    delivery = _take(_inbox(bus, run))
    marks.put(streams.kill_mark_key("tasks", 1), HOSTILE["nested"]).wait()
    delivery.give_back(0.0).wait()
    _take(_inbox(bus, run)).ack().wait()
