"""Loops that each fetch a pack, have it generated and fetch the next: a fixed number, or as many as the engine makes use of.

Too few packs leave the engine's slots empty. Too many wait in its queue, where no other worker can take them, and a swap
that drains waits for them too. `PackLimit` follows from what the engine reports:

1. *The engine has a queue.* Its slots are in use, so a longer queue gains nothing: the limit is adjusted until the queue
   holds one fresh pack for each server, which takes the slots that become free until the next pack is here.
2. *It has none, and every place is taken.* One sample says how many tokens a second so many sequences gave. The fewest
   sequences that reach 95 % of the best throughput seen are what is aimed at; if these are the most that were seen, the
   limit grows, by an eighth at a time.

Nothing is learned from a worker that has a free place: the tasks are what limits it.

`TaskSource` asks the evaluation queue first, then the training queue. A request for a pack is outstanding for one second, never longer: what
the server assigned to an older one would wait here while this worker is busy. While there is no pack, idle workers make these requests as
often as they write heartbeats: the more workers there are, the longer each pauses between two of them. All together still have about a
hundred outstanding.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from penstock.protocol import heartbeats
from penstock.protocol.facts import TaskIssued
from penstock.protocol.groups import Split
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.rollout_service.engines.engine import Engine, first_of

_FETCH_S = 1.0  # the cost of a fetch that NATS, having been killed, never answers
_IDLE_SHARE = 0.2  # a new pack waits at most so much of the time for which there was none
_PRIORITY: tuple[Split, ...] = ("eval", "train")
MOST_PACKS = 64  # of one server, where the number follows it
SAMPLE_S = 1.0  # between two samples
_FIRST_PACKS = 2  # of one server
_ENOUGH = 0.95  # of the best throughput
_WEIGHT = 0.3  # of a new sample in the mean of its bucket, and in the mean queue
_BUCKETS_PER_OCTAVE = 3
_REMEMBERED_S = 120.0  # then a throughput is measured again: prompts and completions change in a run
_STEADY = 1.25  # most by which the running sequences differ between the ends of a sample
log = structlog.get_logger("rollout.pack_loops")
_NEEDED = ("engine_generated_tokens", "engine_running", "engine_queued")
_MOST_WITHOUT = 30  # samples in a row without these figures, after which a warning says so


@dataclass(frozen=True, slots=True)
class ReceivedPack:
    split: Split
    delivery: Delivery[TaskIssued]
    received_at: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def pack_id(self) -> str:
        return self.delivery.fact.pack_id


class TaskSource:
    """The packs of one worker; fetches only while `take` waits and the engine is ready."""

    def __init__(
        self,
        inboxes: Mapping[Split, Inbox[TaskIssued]],
        engine: Engine,
        stop: asyncio.Event,
        *,
        period_s: Callable[[], float] = lambda: heartbeats.PERIOD_S,
    ) -> None:
        self._inboxes: dict[Split, Inbox[TaskIssued]] = {s: inboxes[s] for s in _PRIORITY if s in inboxes}
        self._engine = engine
        self._stop = stop
        self._period_s = period_s
        self._idle_since = 0.0
        self._taking = asyncio.Lock()
        self._fetches: dict[Split, asyncio.Future[list[Delivery[TaskIssued]]]] = {}

    @property
    def num_held(self) -> int:
        return sum(inbox.num_held for inbox in self._inboxes.values())

    async def take(self) -> ReceivedPack | None:
        async with self._taking:
            self._idle_since = time.monotonic()
            while not self._stop.is_set():
                if not self._engine.ready.is_set():
                    await self._requeue_arrived()  # for a worker whose engine is ready
                    await first_of(self._engine.ready.wait(), self._stop.wait())
                    self._idle_since = time.monotonic()
                    continue
                received = self._arrived()
                if received is not None:
                    return received
                await self._request()
        return None

    async def close(self) -> None:
        if self._fetches:
            await asyncio.wait(self._fetches.values())
        await self._requeue_arrived()

    async def _request(self) -> None:
        seconds = pause_s(time.monotonic() - self._idle_since, self._period_s())
        if seconds and not self._fetches:
            await first_of(asyncio.sleep(seconds * random.uniform(0.8, 1.0)), self._stop.wait())  # noqa: S311  keeps no secret
            if self._stop.is_set() or not self._engine.ready.is_set():
                return
        if not (seconds and self._fetches):  # pausing, it sends its requests together
            for split, inbox in self._inboxes.items():
                if split not in self._fetches:
                    self._fetches[split] = asyncio.ensure_future(inbox.fetch(1, _FETCH_S))
        await asyncio.wait(self._fetches.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _requeue_arrived(self) -> None:
        while (received := self._arrived()) is not None:
            await received.delivery.give_back(0.0)

    def _arrived(self) -> ReceivedPack | None:
        for split in self._inboxes:
            fetch = self._fetches.get(split)
            if fetch is not None and fetch.done():
                del self._fetches[split]
                for delivery in fetch.result():
                    return ReceivedPack(split, delivery)
        return None


def pause_s(idle_s: float, period_s: float) -> float:
    """Return the pause between two requests of a worker that has been idle for so long; 0 up to a hundred workers."""
    return max(0.0, min(period_s, _IDLE_SHARE * idle_s) - _FETCH_S)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    at: float  # seconds of a monotonic clock
    generated_tokens: float  # since the engine started
    running: float  # sequences that decode
    queued: float  # sequences that wait for a slot
    held: int  # packs


@dataclass(slots=True)
class _Throughput:
    running: float
    tokens_per_s: float
    at: float


class PackLimit:
    def __init__(self, num_servers: int = 1, *, first: int = _FIRST_PACKS, most: int = MOST_PACKS) -> None:
        """Start with ``first`` packs for each of ``num_servers``; never allow more than ``most`` for each."""
        self.value = first * num_servers
        self._most = most * num_servers
        self._num_servers = num_servers
        self._last: EngineLoad | None = None
        self._queued = 0.0  # mean of the last samples, sequences
        self._throughputs: dict[int, _Throughput] = {}  # by the logarithm of the running sequences

    def observe(self, load: EngineLoad, sequences_per_pack: float) -> int:
        """Return the limit after one more sample, `SAMPLE_S` or a little more after the one before.

        ``sequences_per_pack`` is of a pack that has just been taken.
        """
        before, self._last = self._last, load
        if before is None or load.generated_tokens < before.generated_tokens:  # the engine was started again
            return self.value
        self._measure(before, load)
        if load.held < self.value:
            return self.value
        self._queued += _WEIGHT * (load.queued - self._queued)
        self._move(load, max(1.0, sequences_per_pack) * self._num_servers)
        return self.value

    def _measure(self, before: EngineLoad, load: EngineLoad) -> None:
        low, high = sorted((before.running, load.running))
        self._throughputs = {
            bucket: throughput
            for bucket, throughput in self._throughputs.items()
            if load.at - throughput.at <= _REMEMBERED_S
        }
        if low < 1.0 or high > _STEADY * low or load.at <= before.at:
            return
        running = (low + high) / 2
        tokens_per_s = (load.generated_tokens - before.generated_tokens) / (load.at - before.at)
        known = self._throughputs.setdefault(
            round(_BUCKETS_PER_OCTAVE * math.log2(running)), _Throughput(running, tokens_per_s, load.at)
        )
        known.running += _WEIGHT * (running - known.running)
        known.tokens_per_s += _WEIGHT * (tokens_per_s - known.tokens_per_s)
        known.at = load.at

    def _move(self, load: EngineLoad, fresh: float) -> None:
        if min(load.queued, self._queued) > 2.0 * fresh:
            self._set(self.value - 1)
        elif load.queued > 0.0 and self._queued >= fresh:
            return
        elif (wanted := self._fewest_that_suffice()) is None or load.running < wanted:
            self._set(self.value + max(1, self.value // 8))
        elif load.running > wanted + fresh:
            self._set(self.value - 1)

    def _fewest_that_suffice(self) -> float | None:
        """Return the fewest running sequences that reach nearly the best throughput; None if more than were seen may be better."""
        if not self._throughputs:
            return None
        by_running = [self._throughputs[bucket] for bucket in sorted(self._throughputs)]
        best = max(throughput.tokens_per_s for throughput in by_running)
        fewest = next(throughput for throughput in by_running if throughput.tokens_per_s >= _ENOUGH * best)
        return None if fewest is by_running[-1] else fewest.running

    def _set(self, value: int) -> None:
        self.value = min(self._most, max(1, value))


class PackLoops:
    def __init__(
        self, tasks: TaskSource, engine: Engine, work: Callable[[ReceivedPack], Awaitable[None]], packs_in_flight: int
    ) -> None:
        """Prepare `run`: ``work`` settles a pack. ``packs_in_flight`` = 0: as many as are best for ``engine``."""
        self._tasks = tasks
        self._engine = engine
        self._work = work
        self._follows = None if packs_in_flight else PackLimit(engine.num_servers)
        self.limit = self._follows.value if self._follows else packs_in_flight
        self._num_loops = 0
        self._num_held = 0
        self._sequences_per_pack = 1
        self._ended = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            self._add_loops(loops)
            following = loops.create_task(self._follow(loops)) if self._follows else None
            await self._ended.wait()
            if following is not None:
                following.cancel()

    def _add_loops(self, loops: asyncio.TaskGroup) -> None:
        while self._num_loops < self.limit:
            self._num_loops += 1
            loops.create_task(self._loop())

    async def _loop(self) -> None:
        while self._num_loops <= self.limit and (received := await self._tasks.take()) is not None:
            self._num_held += 1
            if tasks := received.delivery.fact.tasks:
                self._sequences_per_pack = sum(task.group_size + task.redundant_completions for task in tasks)
            await self._work(received)
            self._num_held -= 1
        self._num_loops -= 1
        if not self._num_loops:  # the worker stops
            self._ended.set()

    async def _follow(self, loops: asyncio.TaskGroup) -> None:
        assert self._follows is not None
        num_without = 0
        while True:
            await asyncio.sleep(SAMPLE_S)
            figures = await self._engine.figures()
            if any(name not in figures for name in _NEEDED):
                num_without += self._engine.ready.is_set()
                if num_without == _MOST_WITHOUT:
                    log.warning(
                        "the engine does not report its load, so the number of packs in flight stays as it is: set "
                        "worker.packs_in_flight to a number, or have the server report its metrics",
                        packs_in_flight=self.limit,
                        needed=_NEEDED,
                    )
                continue
            generated, running, queued = (figures[name] for name in _NEEDED)
            load = EngineLoad(time.monotonic(), generated, running, queued, self._num_held)
            limit = self._follows.observe(load, self._sequences_per_pack)
            if limit != self.limit:
                log.info("packs in flight", limit=limit, before=self.limit, running=running, queued=queued)
                self.limit = limit
                self._add_loops(loops)
