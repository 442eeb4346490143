"""What a worker publishes about a pack is stored, whatever ids other messages have taken before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.protocol import streams, subjects, trace_context
from penstock.protocol.facts import RunEvent, TaskIssued
from penstock.protocol.heartbeats import Activity
from penstock.protocol.traces.traces import group_context
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery
from penstock.rollout_service.errors import EngineError, TaskRefused
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.pack_loops import ReceivedPack
from penstock.rollout_service.packs.settlement import PackAnnouncer, Settlement
from tests.groups import make_group, make_task, make_task_issued
from tests.otlp_receiver import recorded
from tests.servers import wait_for


@pytest.fixture
def received(bus: Bus, run_streams: str) -> ReceivedPack:
    fact = make_task_issued(run_streams, "p0", [make_task("e0.p0.a0")])
    bus.publish(subjects.tasks(run_streams, "train"), fact, msg_id="p0", traceparent=trace_context.new_trace()).wait()
    inbox, found = (
        bus.inbox(streams.tasks_consumer(run_streams, "train"), TaskIssued).wait(),
        list[Delivery[TaskIssued]](),
    )
    wait_for(lambda: found.extend(inbox.fetch(1, 0.5).wait()) or found, "the pack")
    return ReceivedPack("train", found[0])


async def test_the_id_of_a_pack_cannot_be_taken_beforehand(
    bus: Bus, blobs: Blobs, run_streams: str, received: ReceivedPack
) -> None:
    """A login that knows the pack's name does not keep its groups from the queue; a second time they are not stored."""
    subject = subjects.generated(run_streams, "train")
    guesses = ("g:p0", "g:p0:", f"g:p0:{'0' * 32}")
    for guess in guesses:
        await bus.publish(subject, received.delivery.fact, msg_id=guess)
    metrics = WorkerMetrics()
    announcer = PackAnnouncer(
        bus=bus, blobs=blobs, activity=Activity(), metrics=metrics, run_id=run_streams, worker_id="w0"
    )
    for _ in range(2):
        await announcer.announce(received, [make_group("e0.p0.a0")])
        assert (await bus.stream_state(f"{run_streams}-generated")).num_messages == len(guesses) + 1


async def test_the_id_of_a_dead_letter_cannot_be_taken_beforehand(
    bus: Bus, run_streams: str, received: ReceivedPack
) -> None:
    """Neither of a letter for single tasks nor of one for the whole message."""
    guesses = [
        f"{start}{end}"
        for start in ("tasks:p0:e0.p0.a0:TooLong", f"{run_streams}-tasks:1")
        for end in ("", ":", ":" + "0" * 32)
    ]
    for guess in guesses:
        await bus.publish(subjects.dead(run_streams, "tasks"), received.delivery.fact, msg_id=guess)
    settlement = Settlement(
        bus, WorkerMetrics(), run_id=run_streams, worker_id="w0", task_attempts=3, retry_delay_s=0.1
    )
    await settlement.refuse(received, received.delivery.fact.tasks, TaskRefused("TooLong", "its prompt"))
    assert (await bus.stream_state(f"{run_streams}-dead")).num_messages == len(guesses) + 1
    await received.delivery.dead_letter("r", "d")
    assert (await bus.stream_state(f"{run_streams}-dead")).num_messages == len(guesses) + 2


async def test_spans_show_how_a_pack_was_generated(
    bus: Bus, blobs: Blobs, run_streams: str, received: ReceivedPack
) -> None:
    """Generated, announced, requeued, dead-lettered: each group's trace says so; an event, that it was redelivered."""
    traces, spans = recorded()
    common: dict[str, Any] = {"run_id": run_streams, "worker_id": "w0", "traces": traces}
    settlement = Settlement(bus, WorkerMetrics(), task_attempts=2, retry_delay_s=0.01, **common)
    announcer = PackAnnouncer(bus=bus, blobs=blobs, activity=Activity(), metrics=WorkerMetrics(), **common)
    before = (await bus.stream_state(f"{run_streams}-generated")).num_messages
    events: list[RunEvent] = []
    await bus.tail(f"{run_streams}-events", subjects.events(run_streams, "log"), RunEvent, events.append)
    async with settlement.settling(received):
        raise EngineError("secret")
    inbox = await bus.inbox(streams.tasks_consumer(run_streams, "train"), TaskIssued)
    [again] = await inbox.fetch(1, 30.0)
    await announcer.announce(ReceivedPack("train", again), [make_group("e0.p0.a0")])
    untraced = PackAnnouncer(
        bus=bus, blobs=blobs, activity=Activity(), metrics=WorkerMetrics(), run_id=run_streams, worker_id="w0"
    )
    await untraced.announce(ReceivedPack("train", again), [make_group("e0.p0.a0")])
    assert (await bus.stream_state(f"{run_streams}-generated")).num_messages == before + 1, "the same message id"
    async with settlement.settling(ReceivedPack("train", again)):
        raise EngineError("secret")
    await asyncio.to_thread(wait_for, lambda: events, "the event")
    assert [event.data["text"] for event in events] == ["1 group redelivered (delivery 2), now with w0"]
    assert [(span.name, span.error, span.attributes.get("outcome", "")) for span in spans] == [
        ("generate", "EngineError", "requeued"),
        ("generate", "", ""),
        ("announce", "", ""),
        ("generate", "EngineError", "dead-lettered"),
    ]
    first = group_context(received.delivery.traceparent, "e0.p0.a0")
    assert {span.parent for span in spans} == {first}
    assert spans[1].end <= spans[2].start
    assert "secret" not in repr(spans)
