"""The NATS adapter on real servers: its guarantees, and the error of each failure."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import nats
import pytest
import structlog
from nats.aio.msg import Msg
from nats.js import api
from tests.groups import make_generated, make_group, make_scored, make_task, make_task_issued
from tests.servers import wait_for

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import (
    BusRefused,
    BusUnreachable,
    CompareAndSwapFailed,
    MessageTooLarge,
    MissingStream,
    StreamFull,
)
from penstock.protocol.facts import (
    DeadLetter,
    Fact,
    GroupGenerated,
    GroupScored,
    RunEvent,
    TaskIssued,
    WeightsPublished,
    decode,
    encode,
)
from penstock.protocol.groups import BlobRef
from penstock.protocol.streams import BucketSpec, ConsumerSpec, StreamLimits, StreamSpec
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.transport.key_value import BucketState
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.transport.nats_connection import Connection
from penstock.protocol.transport.tail import direct_get

OwnNats = Callable[[], NatsServer]
SHORT = StreamLimits(ack_wait_s=0.5, scored_ack_wait_s=0.5)


@pytest.fixture
def short_run(bus: Bus, blobs: Blobs, run_id: str) -> str:
    """A run whose messages are redelivered half a second after their reader ended."""
    bootstrap(bus, blobs, run_id, SHORT)
    return run_id


def issue(bus: Bus, run: str, number: int, *, split: str = "train") -> bool:
    """Publish task pack ``number``; returns True if it is a duplicate for the server."""
    return issuing(bus, run, number, split).wait().duplicate


def issuing(bus: Bus, run: str, number: int, split: str = "train", *, deadline_s: float = 120.0) -> Pending[Receipt]:
    fact = make_task_issued(run, f"p{number}", [make_task(f"e0.p{number}.a0")])
    return bus.publish(subjects.tasks(run, split), fact, msg_id=f"p{number}", deadline_s=deadline_s)


def task_inbox(bus: Bus, run: str, limits: StreamLimits | None = None) -> Inbox[TaskIssued]:
    return bus.inbox(streams.tasks_consumer(run, "train", limits), TaskIssued).wait()


def consumer_info(bus: Bus, run: str) -> api.ConsumerInfo:
    asked = bus._connection.js.consumer_info(f"{run}-tasks", "rollout-train")
    return bus._connection.call(asked, "test").wait()


def take_one(inbox: Inbox[TaskIssued], deadline_s: float = 60.0) -> Delivery[TaskIssued]:
    found: list[Delivery[TaskIssued]] = []
    wait_for(lambda: found.extend(inbox.fetch(1, 1.0).wait()) or found, "a message", deadline_s)
    return found[0]


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def test_an_acknowledged_message_is_removed_from_its_queue(bus: Bus, run_streams: str) -> None:
    """A message has its trace; the broker counts those that wait and those that are held."""
    trace = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    fact = make_task_issued(run_streams, "p1", [make_task("e0.p1.a0")])
    bus.publish(subjects.tasks(run_streams, "train"), fact, msg_id="p1", traceparent=trace).wait()
    for number in (2, 3):
        issue(bus, run_streams, number)
    inbox = task_inbox(bus, run_streams)
    delivery = take_one(inbox)
    assert (delivery.fact, delivery.traceparent) == (fact, trace)
    assert (delivery.num_delivered, inbox.num_held) == (1, 1)

    def two_wait_and_one_is_held() -> bool:
        state = bus.consumer_state(streams.tasks_consumer(run_streams, "train")).wait()
        return (state.num_pending, state.num_ack_pending) == (2, 1)

    wait_for(two_wait_and_one_is_held, "the broker's figures")
    delivery.ack().wait()
    assert inbox.num_held == 0
    assert bus.stream_state(f"{run_streams}-tasks").wait().num_messages == 2


def test_a_queue_is_read_without_taking_from_it(bus: Bus, run_streams: str) -> None:
    """All messages are read, in several batches, held ones too; they are still delivered to a fetch."""
    stream = f"{run_streams}-tasks"
    assert bus.read_stream(stream).wait() == []
    for number in range(700):
        issue(bus, run_streams, number)
    delivery = take_one(task_inbox(bus, run_streams))
    found = bus.read_stream(stream).wait()
    assert [message.sequence for message in found] == list(range(1, 701))
    assert decode(found[0].data, TaskIssued) == delivery.fact
    assert found[0].subject == subjects.tasks(run_streams, "train")
    delivery.ack().wait()
    assert len(bus.read_stream(stream).wait()) == 699
    with pytest.raises(MissingStream, match=r"no-such-tasks.*penstock bootstrap"):
        bus.read_stream("no-such-tasks").wait()


def test_an_event_under_the_subject_of_another_kind_is_not_handed_over(bus: Bus, run_streams: str) -> None:
    """A login that may publish `log` alone cannot report a step: its event is skipped, and the next is read."""
    found: list[RunEvent] = []
    problems: list[str] = []
    bus.tail(
        f"{run_streams}-events", subjects.events(run_streams), RunEvent, found.append, from_start=True,
        on_unreadable=lambda err: problems.append(str(err)),
    ).wait()  # fmt: skip
    for kind in ("step", "log"):
        event = RunEvent(run_id=run_streams, source="w0", kind=kind, at=0.0, data={"step": 1})
        bus.publish(subjects.events(run_streams, "log"), event, msg_id=kind).wait()
    wait_for(lambda: found, "the event")
    assert [event.kind for event in found] == ["log"]
    assert problems == [f"an event of kind 'step' was published to {subjects.events(run_streams, 'log')}"]


@pytest.mark.parametrize("headers", [{"Status": "404"}, {"Status": "503"}, {"Nats-Sequence": "x", "Nats-Subject": "y"}])
def test_headers_of_a_stored_message_do_not_end_a_listing(
    bus: Bus, run_streams: str, nats_settings: NatsSettings, headers: dict[str, str]
) -> None:
    """A message whose writer gave it the headers of a status is listed like any other, and so is what follows it."""
    subject, bucket = subjects.events(run_streams, "log"), f"{run_streams}-live"

    async def send() -> None:
        client = await nats.connect(nats_settings.url, user=nats_settings.user, password=nats_settings.secret())
        for target in (subject, f"$KV.{bucket}.rollout.a"):
            await client.jetstream().publish(target, b"", headers=headers)
        await client.close()

    asyncio.run(send())
    bus.publish(subject, RunEvent(run_id=run_streams, source="x", kind="log", at=0.0), msg_id="after").wait()
    live = bus.key_value(bucket).wait()
    live.put("rollout.b", b"1").wait()
    assert [(m.sequence, m.subject) for m in bus.read_stream(f"{run_streams}-events").wait()] == [
        (1, subject),
        (2, subject),
    ]
    assert sorted(entry.key for entry in live.entries().wait()) == ["rollout.a", "rollout.b"]


def test_the_same_message_id_is_stored_once(bus: Bus, run_streams: str) -> None:
    assert issue(bus, run_streams, 1) is False
    assert issue(bus, run_streams, 1) is True
    assert bus.stream_state(f"{run_streams}-tasks").wait().num_messages == 1


def test_a_fetch_returns_available_messages_without_waiting_for_more(bus: Bus, run_streams: str) -> None:
    """A fetch of many ends with the few that are there, long before its time is up."""
    for number in range(3):
        issue(bus, run_streams, number)
    inbox = task_inbox(bus, run_streams)
    started = time.monotonic()
    assert [d.fact.pack_id for d in inbox.fetch(50, 60.0).wait()] == ["p0", "p1", "p2"]
    assert time.monotonic() - started < 30.0


def test_an_ended_fetch_keeps_no_message_from_others(bus: Bus, run_streams: str, nats_settings: NatsSettings) -> None:
    first = task_inbox(bus, run_streams)
    assert first.fetch(10, 0.1).wait() == []
    with Bus.connect(nats_settings, name="other") as other:
        second = task_inbox(other, run_streams)
        issue(bus, run_streams, 1)
        assert len(second.fetch(10, 30.0).wait()) == 1


def test_a_waiting_fetch_is_one_request(bus: Bus, run_streams: str) -> None:
    """A reader without messages does not poll: it sends nothing more while it waits."""
    waiting = task_inbox(bus, run_streams).fetch(1, 60.0)
    wait_for(lambda: consumer_info(bus, run_streams).num_waiting == 1, "the request")
    sent = bus._connection.client.stats["out_msgs"]
    time.sleep(1.2)
    assert bus._connection.client.stats["out_msgs"] <= sent + 1
    issue(bus, run_streams, 1)
    assert [delivery.fact.pack_id for delivery in waiting.wait()] == ["p1"]


def test_a_queue_has_room_for_the_requests_of_thousands_of_workers(bus: Bus, run_streams: str) -> None:
    """The server's default of 512 waiting requests is raised; a consumer that is there keeps what it has."""
    consumer, js = streams.tasks_consumer(run_streams, "train"), bus._connection.js
    assert consumer_info(bus, run_streams).config.max_waiting == 20_000
    bus._connection.call(js.delete_consumer(consumer.stream, consumer.durable), "test").wait()
    older = api.ConsumerConfig(
        durable_name=consumer.durable,
        filter_subject=consumer.filter_subject,
        ack_policy=api.AckPolicy.EXPLICIT,
        deliver_policy=api.DeliverPolicy.ALL,
        max_deliver=-1,
    )
    bus._connection.call(js.add_consumer(consumer.stream, older), "test").wait()
    bus.ensure_consumer(consumer).wait()
    assert consumer_info(bus, run_streams).config.max_waiting == 512


def test_splits_have_consumers_of_their_own(bus: Bus, run_streams: str) -> None:
    issue(bus, run_streams, 1, split="eval")
    assert task_inbox(bus, run_streams).fetch(1, 0.1).wait() == []
    evaluation = bus.inbox(streams.tasks_consumer(run_streams, "eval"), TaskIssued).wait()
    assert len(evaluation.fetch(1, 30.0).wait()) == 1


# ── redelivery ────────────────────────────────────────────────────────────────────────────────────


def test_a_held_message_is_not_delivered_to_others(bus: Bus, short_run: str, nats_settings: NatsSettings) -> None:
    """Keep-alives hold a message for longer than its ack wait, while its reader's own thread is busy."""
    issue(bus, short_run, 1)
    delivery = take_one(task_inbox(bus, short_run, SHORT))
    with Bus.connect(nats_settings, name="rival") as rival:
        assert task_inbox(rival, short_run, SHORT).fetch(1, 4 * SHORT.ack_wait_s).wait() == []
    delivery.ack().wait()
    assert bus.stream_state(f"{short_run}-tasks").wait().num_messages == 0


def test_a_redelivered_message_that_is_still_held_is_not_delivered_twice(bus: Bus, short_run: str) -> None:
    """A redelivery renews the handle of the delivery at hand, and its acknowledgement counts."""
    issue(bus, short_run, 1)
    spec = streams.tasks_consumer(short_run, "train", SHORT)
    inbox = task_inbox(bus, short_run, SHORT)
    delivery = take_one(inbox)
    bus.reset_consumer(spec).wait()
    assert inbox.fetch(1, 0.3).wait() == []
    state = bus.consumer_state(spec).wait()
    assert (state.num_pending, state.num_ack_pending, inbox.num_held) == (0, 1, 1)
    delivery.ack().wait()
    assert bus.stream_state(f"{short_run}-tasks").wait().num_messages == 0


def test_a_restarted_reader_gets_its_messages_at_once(bus: Bus, run_streams: str, nats_settings: NatsSettings) -> None:
    """After a reset, all unacknowledged messages are redelivered without waiting for their ack wait."""
    issue(bus, run_streams, 1)
    with Bus.connect(nats_settings, name="first life") as reader:
        take_one(task_inbox(reader, run_streams))
    bus.reset_consumer(streams.tasks_consumer(run_streams, "train")).wait()
    assert len(task_inbox(bus, run_streams).fetch(1, 30.0).wait()) == 1


def test_a_requeued_message_is_redelivered_after_its_delay(bus: Bus, run_streams: str) -> None:
    issue(bus, run_streams, 1)
    inbox = task_inbox(bus, run_streams)
    delivery = take_one(inbox)
    started = time.monotonic()
    delivery.give_back(0.5).wait()
    assert inbox.num_held == 0
    again = take_one(inbox)
    assert time.monotonic() - started >= 0.5
    assert again.num_delivered == 2


def test_a_message_redelivered_immediately_is_held_again(bus: Bus, run_streams: str) -> None:
    """A message redelivered during its negative acknowledgement is held, and its ack wait extended, like any other."""
    issue(bus, run_streams, 1)
    inbox = task_inbox(bus, run_streams)
    delivery = take_one(inbox)
    for _ in range(20):
        waiting = inbox.fetch(1, 30.0)
        delivery.give_back(0.0).wait()
        (delivery,) = waiting.wait()
        assert inbox.num_held == 1


# ── dead letters ──────────────────────────────────────────────────────────────────────────────────


def dead_letters(bus: Bus, run: str, count: int) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    bus.tail(f"{run}-dead", subjects.dead(run), DeadLetter, letters.append, from_start=True).wait()
    wait_for(lambda: len(letters) >= count, f"{count} dead letters")
    return letters


@pytest.mark.parametrize(
    ("stage", "consumer", "kind"),
    [
        ("tasks", lambda run: streams.tasks_consumer(run, "train"), TaskIssued),
        ("generated", streams.generated_consumer, GroupGenerated),
        ("scored", lambda run: streams.scored_consumer(run, "train"), GroupScored),
    ],
)
def test_undecodable_messages_of_every_kind_are_dead_lettered_in_every_queue(
    bus: Bus, run_streams: str, stage: str, consumer: Callable, kind: type[Fact]
) -> None:
    """Garbage, another tag, another run's message: each is a dead letter with reason and bytes, delivered once."""
    run = run_streams
    subject = f"penstock.{run}.{stage}.train"
    foreign = {
        "tasks": make_task_issued("other", "p"),
        "generated": make_generated("other", [make_group()]),
        "scored": make_scored(make_generated("other", [make_group()])),
    }[stage]
    poison = [
        b"\xc1 garbage \x00\xff" * 9,
        b"",
        encode(RunEvent(run_id=run, source="t", kind="log", at=0.0)),
        encode(foreign),
    ]
    for data in poison:
        bus._connection.call(bus._connection.js.publish(subject, data), "poison").wait()
    inbox = bus.inbox(consumer(run), kind).wait()

    def is_empty() -> bool:
        assert inbox.fetch(9, 0.1).wait() == []
        return bus.stream_state(f"{run}-{stage}").wait().num_messages == 0

    wait_for(is_empty, "an empty queue")
    letters = dead_letters(bus, run, len(poison))
    assert sorted(letter.payload for letter in letters) == sorted(poison)
    assert {letter.reason for letter in letters} == {"MalformedFact", "UnknownSchema"}
    assert all((letter.num_delivered, letter.stage) == (1, stage) for letter in letters)
    assert any("a message of run 'other'" in letter.detail for letter in letters)


def test_an_undecodable_message_does_not_delay_the_others(bus: Bus, run_streams: str) -> None:
    event = RunEvent(run_id=run_streams, source="test", kind="log", at=0.0)
    issue(bus, run_streams, 1)
    bus.publish(subjects.tasks(run_streams, "train"), event, msg_id="poison").wait()
    issue(bus, run_streams, 2)
    assert [d.fact.pack_id for d in task_inbox(bus, run_streams).fetch(10, 30.0).wait()] == ["p1", "p2"]


def test_a_reader_can_send_a_message_to_the_dead_letters(bus: Bus, run_streams: str) -> None:
    """A message that cannot be processed is stored with its reason, its groups and its payload."""
    issue(bus, run_streams, 1)
    delivery = take_one(task_inbox(bus, run_streams))
    delivery.dead_letter("reward_unknown", "no reward is called 'exactly'").wait()
    (letter,) = dead_letters(bus, run_streams, 1)
    assert (letter.reason, letter.detail) == ("reward_unknown", "no reward is called 'exactly'")
    assert letter.group_ids == ("e0.p1.a0",)
    assert decode(letter.payload, TaskIssued) == delivery.fact
    assert bus.stream_state(f"{run_streams}-tasks").wait().num_messages == 0


def test_a_dead_letter_always_fits_into_a_message(bus: Bus, run_streams: str) -> None:
    tasks = [make_task(f"e0.p{i}.{'x' * 150}", prompt_text="long " * 10) for i in range(100)]
    fact = make_task_issued(run_streams, "p1", tasks)
    bus.publish(subjects.tasks(run_streams, "train"), fact, msg_id="1").wait()
    take_one(task_inbox(bus, run_streams)).dead_letter("too_hard", "x" * 10_000).wait()
    (letter,) = dead_letters(bus, run_streams, 1)
    assert decode(letter.payload, TaskIssued) == fact
    assert letter.group_ids[0] == tasks[0].group_id


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


def test_an_oversized_fact_is_refused_with_advice(bus: Bus, run_streams: str) -> None:
    fact = make_task_issued(run_streams, "p1", [make_task(prompt_text="x" * 70_000)])
    with pytest.raises(MessageTooLarge, match="groups_per_message"):
        bus.publish(subjects.tasks(run_streams, "train"), fact, msg_id="1").wait()


def test_a_full_stream_makes_the_publisher_wait(bus: Bus, blobs: Blobs, run_id: str) -> None:
    """Back-pressure: a refused publication succeeds after a reader has freed space, and nothing is lost."""
    bootstrap(bus, blobs, run_id, StreamLimits(max_tasks=3))
    for number in range(3):
        issue(bus, run_id, number)
    fourth = issuing(bus, run_id, 3)
    inbox = task_inbox(bus, run_id)
    held = inbox.fetch(10, 30.0).wait()
    assert not fourth.done()
    held[0].ack().wait()
    assert fourth.wait().duplicate is False
    for delivery in held[1:]:
        delivery.ack().wait()
    assert take_one(inbox).fact.pack_id == "p3"


def test_a_stream_that_stays_full_is_an_error_at_the_deadline(bus: Bus, blobs: Blobs, run_id: str) -> None:
    bootstrap(bus, blobs, run_id, StreamLimits(max_tasks=1))
    issue(bus, run_id, 1)
    fact = make_task_issued(run_id, "p2")
    with pytest.raises(StreamFull, match=rf"penstock\.{run_id}\.tasks\.train stayed full.*its readers"):
        bus.publish(subjects.tasks(run_id, "train"), fact, msg_id="2", full_deadline_s=0.3).wait()


def test_of_several_addresses_one_that_answers_is_used(nats_settings: NatsSettings, run_id: str) -> None:
    """Whichever comes first: a node of a cluster may be down when a service starts."""
    dead = "nats://127.0.0.1:1"
    for url in (f"{dead}, {nats_settings.url}", f"{nats_settings.url},{dead}"):
        with Bus.connect(nats_settings.model_copy(update={"url": url}), name="test", deadline_s=20.0) as bus:
            assert run_id not in bus.stream_names().wait()
    with pytest.raises(BusUnreachable, match=r"no NATS server at nats://127\.0\.0\.1:1,nats://127\.0\.0\.1:2 within"):
        Bus.connect(NatsSettings(url=f"{dead},nats://127.0.0.1:2"), name="test", deadline_s=0.5)
    with pytest.raises(ValueError, match="an address is empty"):
        NatsSettings(url=f"{nats_settings.url},")


def test_a_missing_stream_is_named_with_its_remedy(bus: Bus, run_id: str) -> None:
    """Publishing and binding to a run without streams is an error that explains the bootstrap."""
    with pytest.raises(MissingStream, match=r"penstock bootstrap"):
        issue(bus, run_id, 1)
    with pytest.raises(MissingStream, match=rf"no consumer rollout-train.*penstock bootstrap run\.id={run_id}"):
        task_inbox(bus, run_id)
    with pytest.raises(MissingStream, match=rf"no bucket {run_id}-state"):
        bus.key_value(streams.state_bucket(run_id).bucket).wait()
    with pytest.raises(MissingStream, match=rf"no stream {run_id}-tasks"):
        bus.stream_state(f"{run_id}-tasks").wait()
    with pytest.raises(MissingStream, match=rf"no stream {run_id}-events"):
        bus.tail(f"{run_id}-events", subjects.events(run_id), RunEvent, print).wait()
    bus.ensure_stream(streams.streams(run_id)[0]).wait()
    with pytest.raises(MissingStream, match=rf"consumer rollout-train of {run_id}-tasks.*penstock bootstrap"):
        bus.consumer_state(streams.tasks_consumer(run_id, "train")).wait()


@pytest.mark.parametrize("max_messages", [1, 10])
def test_a_stream_deleted_under_its_reader_is_an_error(bus: Bus, run_streams: str, max_messages: int) -> None:
    """Of a fetch that waits already, and of the next one."""
    inbox = task_inbox(bus, run_streams)
    waiting = inbox.fetch(1, 60.0)
    wait_for(lambda: consumer_info(bus, run_streams).num_waiting == 1, "the request")
    assert bus.delete_stream(f"{run_streams}-tasks").wait() is True
    for fetch in (waiting, inbox.fetch(max_messages, 30.0)):
        with pytest.raises(MissingStream, match="no consumer rollout-train"):
            fetch.wait()
    assert bus.delete_stream(f"{run_streams}-tasks").wait() is False


# ── key-value ─────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_updated_only_from_its_current_revision(bus: Bus, run_streams: str) -> None:
    """Compare-and-swap: the first writer wins, the second gets an error, nothing is overwritten."""
    store = bus.key_value(streams.state_bucket(run_streams).bucket).wait()
    assert store.get("head").wait() is None
    first = store.swap("head", b"1", None).wait()
    with pytest.raises(CompareAndSwapFailed, match="head"):
        store.swap("head", b"x", None).wait()
    second = store.swap("head", b"2", first).wait()
    with pytest.raises(CompareAndSwapFailed, match=f"expected revision {first}"):
        store.swap("head", b"x", first).wait()
    entry = store.get("head").wait()
    assert entry is not None
    assert (entry.value, entry.revision) == (b"2", second)


def test_a_deleted_key_can_be_made_again(bus: Bus, run_streams: str) -> None:
    store = bus.key_value(streams.state_bucket(run_streams).bucket).wait()
    store.put("a", b"1").wait()
    store.put("b.c", b"2").wait()
    store.delete("a").wait()
    assert store.get("a").wait() is None
    assert [(e.key, e.value) for e in store.entries().wait()] == [("b.c", b"2")]
    store.swap("a", b"3", None).wait()
    entries = {e.key: e for e in store.entries().wait()}
    assert {key: e.value for key, e in entries.items()} == {"a": b"3", "b.c": b"2"}
    assert store.get("a").wait() == entries["a"]
    with pytest.raises(CompareAndSwapFailed, match="another writer"):
        store.delete("a", entries["a"].revision - 1).wait()
    assert all(0.0 <= entry.age_s < 600.0 for entry in store.entries(aged=True).wait())
    store.delete("a", entries["a"].revision).wait()
    assert store.get("a").wait() is None


def test_a_value_expires_before_its_bucket(bus: Bus, run_streams: str) -> None:
    store = bus.key_value(streams.live_bucket(run_streams).bucket).wait()
    store.put("short", b"1", ttl_s=1.0).wait()
    store.put("long", b"2", ttl_s=30.0).wait()
    store.put("bucket", b"3").wait()
    assert store.state().wait() == BucketState(3, streams.live_bucket(run_streams).ttl_s)
    wait_for(lambda: store.get("short").wait() is None, "the expiry")
    assert [entry.key for entry in store.entries().wait()] == ["long", "bucket"]


def config_of(bus: Bus, bucket: str) -> api.StreamConfig:
    return bus._connection.call(bus._connection.js.stream_info(f"KV_{bucket}"), "test").wait().config


def test_only_heartbeats_do_not_wait_for_the_disk(bus: Bus, run_streams: str) -> None:
    unsynced = [spec for spec in streams.buckets(run_streams) if config_of(bus, spec.bucket).persist_mode is not None]
    assert unsynced == [streams.live_bucket(run_streams)]


def test_the_synced_bucket_of_heartbeats_of_an_older_version_is_made_again(bus: Bus, run_id: str) -> None:
    """Its keys are lost, a service that is bound to it goes on; repeating that changes nothing."""
    spec = streams.live_bucket(run_id)
    bus.ensure_bucket(BucketSpec(spec.bucket, ttl_s=10.0)).wait()
    store = bus.key_value(spec.bucket).wait()
    store.put("rollout.w0", b"1").wait()
    bus.ensure_bucket(spec).wait()
    assert config_of(bus, spec.bucket).persist_mode == api.PersistMode.ASYNC
    assert store.state().wait() == BucketState(0, spec.ttl_s)
    store.put("rollout.w0", b"2").wait()
    bus.ensure_bucket(spec).wait()
    assert [entry.value for entry in store.entries().wait()] == [b"2"]
    bus.delete_stream(f"KV_{spec.bucket}").wait()


def test_a_bucket_of_an_older_version_gets_its_size_unless_that_is_too_small(bus: Bus, run_id: str) -> None:
    spec = streams.state_bucket(run_id)
    former = BucketSpec(spec.bucket)
    bus.ensure_bucket(former).wait()
    assert config_of(bus, spec.bucket).max_bytes == former.max_bytes > spec.max_bytes
    bus.key_value(spec.bucket).wait().put("head", b"1").wait()
    bus.ensure_bucket(replace(spec, max_bytes=50)).wait()  # less than twice what is stored
    assert config_of(bus, spec.bucket).max_bytes == former.max_bytes
    bus.ensure_bucket(spec).wait()
    assert config_of(bus, spec.bucket).max_bytes == spec.max_bytes
    assert [entry.value for entry in bus.key_value(spec.bucket).wait().entries().wait()] == [b"1"]
    bus.ensure_bucket(replace(spec, max_bytes=2 * spec.max_bytes)).wait()
    assert config_of(bus, spec.bucket).max_bytes == spec.max_bytes
    bus.delete_stream(f"KV_{spec.bucket}").wait()


# ── tails ─────────────────────────────────────────────────────────────────────────────────────────


def event(run: str, number: int) -> RunEvent:
    return RunEvent(run_id=run, source="test", kind="log", at=float(number))


def publish_event(bus: Bus, run: str, number: int) -> None:
    bus.publish(subjects.events(run, "log"), event(run, number), msg_id=f"e{number}").wait()


def watched(bus: Bus, run: str, **options: Any) -> list[float]:
    """Tail a run's events; returns the list to which the number of each is added."""
    seen: list[float] = []
    bus.tail(f"{run}-events", subjects.events(run), RunEvent, lambda fact: seen.append(fact.at), **options).wait()
    return seen


def test_a_tail_yields_everything_in_order_from_the_start(bus: Bus, run_streams: str) -> None:
    """Earlier and later messages arrive once and in order; undecodable ones are skipped."""
    for number in range(5):
        publish_event(bus, run_streams, number)
    bus.publish(subjects.events(run_streams, "log"), make_task_issued(run_streams), msg_id="odd").wait()
    seen = watched(bus, run_streams, from_start=True)
    wait_for(lambda: len(seen) == 5, "the old events")
    for number in range(5, 10):
        publish_event(bus, run_streams, number)
    wait_for(lambda: len(seen) == 10, "the new events")  # announced: sooner than by polling
    assert seen == [float(n) for n in range(10)]


def test_a_tail_from_now_on_yields_only_later_messages(bus: Bus, run_streams: str) -> None:
    """Without from_start nothing old is delivered, and nothing published after the call is missed."""
    publish_event(bus, run_streams, 1)
    seen = watched(bus, run_streams)
    publish_event(bus, run_streams, 2)
    wait_for(lambda: seen, "the new event")
    assert seen == [2.0]


def test_a_tail_that_gathers_reads_many_messages_by_one_request(
    bus: Bus, run_streams: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty events, each stored before the next is sent, are twenty requests for a tail that reads each at once."""
    asked: list[str] = []

    async def counted(connection: Connection, stream: str, request: dict[str, Any]) -> list[Msg]:
        asked.append(stream)
        return await direct_get(connection, stream, request)

    monkeypatch.setattr("penstock.protocol.transport.tail.direct_get", counted)
    seen = watched(bus, run_streams, gather_s=2.0)
    for number in range(20):
        publish_event(bus, run_streams, number)
    wait_for(lambda: len(seen) == 20, "the events")
    assert seen == [float(number) for number in range(20)]
    assert len(asked) <= 10  # two, were it not for a busy machine


def test_a_reader_that_fails_on_one_message_gets_the_next_ones(bus: Bus, run_streams: str) -> None:
    """An exception of the callback is logged with the sequence number and does not end the tail."""
    seen: list[float] = []

    def read(fact: RunEvent) -> None:
        if fact.at == 1.0:
            raise KeyError("step")
        seen.append(fact.at)

    with structlog.testing.capture_logs() as logs:
        bus.tail(f"{run_streams}-events", subjects.events(run_streams), RunEvent, read).wait()
        for number in range(3):
            publish_event(bus, run_streams, number)
        wait_for(lambda: len(seen) == 2, "the other events")
    assert seen == [0.0, 2.0]
    assert [line["sequence"] for line in logs if "a reader failed" in line["event"]] == [2]


def test_a_tail_reads_more_than_one_answer_holds(bus: Bus, run_streams: str) -> None:
    """A watcher that starts late gets every stored message in order, however many there are."""
    subject, seen = subjects.events(run_streams), list[int]()
    published = [bus.publish(subject[:-1] + "log", event(run_streams, n), msg_id=f"e{n}") for n in range(600)]
    for publication in published:
        publication.wait()
    bus.follow(f"{run_streams}-events", subject, RunEvent, lambda _, number, __: seen.append(number), after=10).wait()
    wait_for(lambda: len(seen) >= 590, "the stored events")
    assert seen == list(range(11, 601))


def test_a_tail_ends_with_its_stream(bus: Bus, run_streams: str) -> None:
    """A watcher of a deleted stream logs it and stops asking for messages."""

    async def announce() -> None:
        await bus._connection.client.publish(subjects.stored(subjects.events(run_streams, "log")))

    with structlog.testing.capture_logs() as logs:
        bus.tail(f"{run_streams}-events", subjects.events(run_streams), RunEvent, print).wait()
        bus.delete_stream(f"{run_streams}-events").wait()
        bus._connection.call(announce(), "announcement").wait()
        wait_for(lambda: any("its stream was deleted" in line["event"] for line in logs), "the end of the tail")


def test_a_tail_can_watch_one_subject_of_a_stream(bus: Bus, run_streams: str) -> None:
    seen: list[WeightsPublished] = []
    bus.tail(
        f"{run_streams}-weights",
        subjects.weights_published(run_streams),
        WeightsPublished,
        seen.append,
        from_start=True,
    ).wait()
    bus.publish(subjects.weights_applied(run_streams), event(run_streams, 1), msg_id="1").wait()
    manifest = BlobRef(key="k", size_bytes=1, sha256="0" * 64)
    fact = WeightsPublished(run_id=run_streams, version=1, step=1, manifest=manifest, num_bytes=1)
    bus.publish(subjects.weights_published(run_streams), fact, msg_id="2").wait()
    wait_for(lambda: seen, "the published version")
    assert seen == [fact]


# ── a server that is killed ───────────────────────────────────────────────────────────────────────


def reader_of_tasks(bus: Bus, run: str, num: int) -> Inbox[TaskIssued]:
    """The inbox of a consumer of a run's tasks, of which ``num`` are issued."""
    for spec in streams.streams(run):
        bus.ensure_stream(spec).wait()
    consumer = ConsumerSpec(f"{run}-tasks", "reader", subjects.tasks(run), 30.0, 1000, run, "tasks")
    bus.ensure_consumer(consumer).wait()
    for number in range(num):
        issue(bus, run, number)
    return bus.inbox(consumer, TaskIssued).wait()


def test_a_server_killed_during_publishing_loses_nothing(own_nats: OwnNats, run_id: str) -> None:
    """Three SIGKILLs among 600 publications: afterwards every message is there exactly once."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        bus.ensure_stream(streams.streams(run_id)[0]).wait()
        pending: list[Pending[Receipt]] = []

        def num_done() -> int:
            return sum(p.done() for p in pending)

        for life in range(3):
            pending += [issuing(bus, run_id, number) for number in range(200 * life, 200 * life + 200)]
            wait_for(lambda enough=200 * life + 20: num_done() > enough, "some acknowledgements")
            server.kill()
            wait_for(lambda: bus.down_s > 0.0, "the loss to be noticed")
            server.restart()
        receipts = [p.wait() for p in pending]
        assert len({receipt.sequence for receipt in receipts}) == 600
        assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 600
        assert bus.down_s == 0.0
        inbox = reader_of_tasks(bus, run_id, 0)
        seen: list[str] = []
        while len(seen) < 600:
            found = inbox.fetch(100, 30.0).wait()
            assert found, f"only {len(seen)} of 600 messages"
            seen += [d.fact.pack_id for d in found]
            for ack in [d.ack() for d in found]:
                ack.wait()
        assert sorted(seen) == sorted(f"p{n}" for n in range(600))


def test_acknowledgements_are_repeated_after_a_server_is_killed(own_nats: OwnNats, run_id: str) -> None:
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        inbox = reader_of_tasks(bus, run_id, 90)
        found = inbox.fetch(90, 30.0).wait()
        assert len(found) == 90
        Delivery.ack_all(found[:30])
        assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 60
        Delivery.ack_all([])
        pending = [delivery.ack() for delivery in found[30:60]]
        server.kill()
        pending += [delivery.ack() for delivery in found[60:]]
        server.restart()
        for ack in pending:
            ack.wait()
        assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 0
        assert inbox.num_held == 0


def test_a_server_that_lost_its_deliveries_gets_the_acknowledgements(own_nats: OwnNats, run_id: str) -> None:
    """A consumer whose state was lost with its server confirms held messages, and delivers the others once."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        inbox = reader_of_tasks(bus, run_id, 12)
        held = inbox.fetch(10, 30.0).wait()
        assert len(held) == 10
        server.kill()
        for record in server.store.rglob("obs/reader/o.dat"):
            record.unlink()
        server.restart()
        Delivery.ack_all(held[3:])
        Delivery.ack_all(held[:3])
        assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 2
        rest = inbox.fetch(5, 30.0).wait()
        assert len(rest) == 2
        Delivery.ack_all(rest)
        assert inbox.num_held == 0


def test_readers_continue_after_a_server_is_killed(own_nats: OwnNats, run_id: str) -> None:
    """A waiting fetch, a tail and a held message go on after its restart; so do buckets, heartbeats without newest."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        for spec in streams.streams(run_id, SHORT):
            bus.ensure_stream(spec).wait()
        for spec in streams.buckets(run_id):
            bus.ensure_bucket(spec).wait()
        for spec in streams.consumers(run_id, SHORT):
            bus.ensure_consumer(spec).wait()
        live = bus.key_value(f"{run_id}-live").wait()
        live.put("rollout.w0", b"1", ttl_s=30.0).wait()
        seen = watched(bus, run_id, from_start=True)
        publish_event(bus, run_id, 1)
        wait_for(lambda: seen, "the first event")
        store = bus.key_value(f"{run_id}-state").wait()
        revision = store.put("head", b"1").wait()
        inbox = task_inbox(bus, run_id, SHORT)
        issue(bus, run_id, 1)
        held = take_one(inbox)
        waiting = inbox.fetch(5, 60.0)
        server.kill()
        wait_for(lambda: bus.down_s > 0.0, "the loss to be noticed")
        assert not waiting.done()
        server.restart()
        publish_event(bus, run_id, 2)
        issue(bus, run_id, 2)
        assert [d.fact.pack_id for d in waiting.wait()] == ["p2"]
        held.ack().wait()
        assert store.swap("head", b"2", revision).wait() > revision
        live.put("rollout.w1", b"2", ttl_s=30.0).wait()
        assert "rollout.w1" in {entry.key for entry in live.entries().wait()}
        assert config_of(bus, live.bucket).persist_mode == api.PersistMode.ASYNC
        wait_for(lambda: seen == [1.0, 2.0], "the second event")
        assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 1


def test_a_key_is_read_although_the_server_is_killed_during_the_read(own_nats: OwnNats, run_id: str) -> None:
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        for spec in streams.buckets(run_id):
            bus.ensure_bucket(spec).wait()
        store = bus.key_value(streams.state_bucket(run_id).bucket).wait()
        revision = store.put("head", b"1").wait()
        sent = bus._connection.client.stats["out_msgs"]
        os.kill(server.child.pid, signal.SIGSTOP)
        reads = [store.get("head") for _ in range(3)]
        listing = store.entries()
        wait_for(lambda: bus._connection.client.stats["out_msgs"] >= sent + 4, "the requests to be under way")
        server.kill()
        server.restart()
        found = {(entry.value, entry.revision) for read in reads if (entry := read.wait()) is not None}
        assert found == {(b"1", revision)}
        assert [entry.key for entry in listing.wait()] == ["head"]


def test_a_fetch_from_an_unreachable_server_is_empty_after_its_timeout(own_nats: OwnNats, run_id: str) -> None:
    """The reader's loop continues, and the bus reports for how long the server has been unreachable."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        bus.ensure_stream(StreamSpec(f"{run_id}-tasks", (subjects.tasks(run_id),), "workqueue", 10, 1_000_000)).wait()
        bus.ensure_consumer(streams.tasks_consumer(run_id, "train")).wait()
        inbox = task_inbox(bus, run_id)
        assert bus.down_s == 0.0
        server.kill()
        wait_for(lambda: bus.down_s > 0.0, "the loss to be noticed")
        assert inbox.fetch(1, 0.1).wait() == []
        assert inbox.fetch(5, 0.1).wait() == []
        with pytest.raises(BusUnreachable, match=r"publication to .* within 1 s.*has been unreachable for"):
            bus.publish(subjects.tasks(run_id, "train"), make_task_issued(run_id), msg_id="1", deadline_s=1.0).wait()


# ── connecting and closing ────────────────────────────────────────────────────────────────────────


def test_wrong_credentials_are_refused_at_once(nats_settings: NatsSettings) -> None:
    """A wrong password is not retried, and the text names user and settings."""
    started = time.monotonic()
    with pytest.raises(BusRefused, match=r"refused user penstock: check nats\.user and nats\.password"):
        Bus.connect(nats_settings.model_copy(update={"password": "wrong"}), name="test", deadline_s=60.0)
    assert time.monotonic() - started < 30.0


def test_a_server_that_starts_late_is_waited_for(own_nats: OwnNats) -> None:
    server = own_nats()
    server.stop()
    starter = threading.Thread(target=server.restart)
    starter.start()
    with Bus.connect(server.settings, name="test", deadline_s=20.0) as bus:
        assert bus.down_s == 0.0
    starter.join()


def test_closing_ends_waiting_calls_with_an_error(nats_settings: NatsSettings, run_streams: str) -> None:
    bus = Bus.connect(nats_settings, name="test")
    pending = task_inbox(bus, run_streams).fetch(1, 60.0)
    bus.close()
    with pytest.raises(BusUnreachable, match="closed during the call"):
        pending.wait()
    with pytest.raises(BusUnreachable, match="bus is closed"):
        bus.stream_state("x")
    bus.close()


def test_a_denied_publication_is_an_error(own_nats: OwnNats, run_id: str) -> None:
    """A user without the right to publish gets the server's reason, not a timeout."""
    server = own_nats()
    config = server.store / "nats.conf"
    text = config.read_text()
    start = text.index("authorization {")
    rights = 'permissions: { publish: { allow: ["$JS.API.>"] } }'
    config.write_text(f'{text[:start]}authorization {{ users: [ {{ user: "reader", password: "r", {rights} }} ] }}\n')
    os.kill(server.child.pid, signal.SIGHUP)
    wait_for(lambda: "Reloaded server configuration" in server.child.log_tail(), "the new rights")
    settings = server.settings.model_copy(update={"user": "reader", "password": "r"})
    with Bus.connect(settings, name="test") as bus:
        bus.ensure_stream(StreamSpec(f"{run_id}-tasks", (subjects.tasks(run_id),), "workqueue", 10, 1_000_000)).wait()
        with pytest.raises(BusRefused, match=r"(?i)publication to .* was refused.*permissions violation"):
            issue(bus, run_id, 1)
