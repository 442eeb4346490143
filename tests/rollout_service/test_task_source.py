"""The source of a worker's packs: it asks only while a pack could be started, and keeps none from other workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol import streams, subjects
from penstock.protocol.activity import Activity
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.facts import Heartbeat, Split, TaskIssued, decode
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.inbox import Inbox
from penstock.rollout_service.heartbeat import HeartbeatWriter
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.task_source import TaskSource
from tests.groups import make_task, make_task_issued

_SPLITS: tuple[Split, ...] = ("eval", "train")


@dataclass
class IdleEngine:
    """An engine that is ready or not, as a test says."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    version: None = None

    async def figures(self) -> dict[str, float]:
        return {}

    def cpu_seconds(self) -> float:
        return 0.0


@dataclass
class Worker:
    """A source with its engine."""

    source: TaskSource
    engine: IdleEngine
    stop: asyncio.Event


async def worker(bus: Bus, run: str) -> Worker:
    inboxes: dict[Split, Inbox[TaskIssued]] = {
        split: await bus.inbox(streams.tasks_consumer(run, split), TaskIssued) for split in _SPLITS
    }
    engine: Any = IdleEngine()
    engine.ready.set()
    stop = asyncio.Event()
    return Worker(TaskSource(inboxes, engine, stop), engine, stop)


async def issue(bus: Bus, run: str, pack: str, split: Split = "train") -> None:
    fact = make_task_issued(run, pack, [make_task(f"e0.{pack}.a0")])
    await bus.publish(subjects.tasks(run, split), fact, msg_id=pack)


async def num_waiting(bus: Bus, run: str) -> int:
    """How many requests wait in both queues of tasks."""
    js = bus._connection.js
    infos = [await bus._connection.call(js.consumer_info(f"{run}-tasks", f"rollout-{s}"), "test") for s in _SPLITS]
    return sum(info.num_waiting or 0 for info in infos)


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def waits(bus: Bus, run: str, number: int) -> None:
    async def as_many() -> bool:
        return await num_waiting(bus, run) == number

    await until(as_many)


def test_a_worker_with_a_pack_asks_for_none(nats_settings: NatsSettings, run_streams: str) -> None:
    """While it generates, its requests are withdrawn: the next pack is delivered to an idle worker, once."""

    async def scenario() -> None:
        with Bus.connect(nats_settings, name="a") as first_bus, Bus.connect(nats_settings, name="b") as second_bus:
            first = await worker(first_bus, run_streams)
            taking = asyncio.ensure_future(first.source.take())
            await waits(first_bus, run_streams, 2)
            await issue(first_bus, run_streams, "p0")
            received = await taking
            assert received is not None
            await waits(first_bus, run_streams, 0)
            second = await worker(second_bus, run_streams)
            await issue(first_bus, run_streams, "p1", "eval")
            other = await second.source.take()
            assert other is not None
            assert (other.pack_id, other.split, other.delivery.num_delivered) == ("p1", "eval", 1)
            for done in (received, other):
                await done.delivery.ack()
            assert first.source.num_held == second.source.num_held == 0

    asyncio.run(scenario())


def test_an_idle_worker_stops_at_once(nats_settings: NatsSettings, run_streams: str) -> None:
    """It does not wait for the end of its long requests, which are withdrawn."""

    async def scenario() -> None:
        with Bus.connect(nats_settings, name="a") as bus:
            one = await worker(bus, run_streams)
            taking = asyncio.ensure_future(one.source.take())
            await waits(bus, run_streams, 2)
            began = time.monotonic()
            one.stop.set()
            assert await taking is None
            await one.source.close()
            assert time.monotonic() - began < 3.0
            await waits(bus, run_streams, 0)

    asyncio.run(scenario())


def test_a_worker_whose_engine_fails_asks_for_no_more_packs(nats_settings: NatsSettings, run_streams: str) -> None:
    """Its requests are withdrawn within about a second, and made again when the engine is ready."""

    async def scenario() -> None:
        with Bus.connect(nats_settings, name="a") as bus:
            one = await worker(bus, run_streams)
            taking = asyncio.ensure_future(one.source.take())
            await waits(bus, run_streams, 2)
            one.engine.ready.clear()
            await waits(bus, run_streams, 0)
            await issue(bus, run_streams, "p0")
            assert one.source.num_held == 0
            one.engine.ready.set()
            received = await taking
            assert received is not None
            assert (received.pack_id, received.delivery.num_delivered) == ("p0", 1)
            await received.delivery.ack()

    asyncio.run(scenario())


def test_a_worker_among_many_announces_a_long_period(nats_settings: NatsSettings, run_streams: str) -> None:
    """It counts the services when it starts: with 300 in the bucket its heartbeats come every 3 s, and it says so."""

    async def scenario() -> None:
        with Bus.connect(nats_settings, name="a") as bus:
            live = await bus.key_value(streams.live_bucket(run_streams).bucket)
            await asyncio.gather(*(live.put(f"rollout.o{number}", b"x") for number in range(300)))
            engine: Any = IdleEngine()
            writer = HeartbeatWriter(
                bus=bus, engine=engine, activity=Activity(), metrics=WorkerMetrics(), packs_held=lambda: 0,
                needs_version=lambda: None, run_id=run_streams, worker_id="w0",
            )  # fmt: skip
            writing = asyncio.ensure_future(writer.run())
            key = streams.heartbeat_key("rollout", "w0")

            async def is_written() -> bool:
                return await live.get(key) is not None

            await until(is_written)
            entry = await live.get(key)
            assert entry is not None
            assert decode(entry.value, Heartbeat).period_s == 3.0
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(scenario())
