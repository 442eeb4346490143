"""Fetch the next pack: from the evaluation queue first, then from the training queue.

A request for a pack is outstanding for one second, never longer: what the server assigned to an older one would wait here
while this worker is busy. While there is no pack, idle workers make these requests as often as they write heartbeats: the
more workers there are, the longer each pauses between two of them. All together still have about a hundred outstanding.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol import heartbeats
from penstock.protocol.facts import Split, TaskIssued
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.rollout_service.engines.engine import Engine

_FETCH_S = 1.0  # the cost of a fetch that NATS, having been killed, never answers
_IDLE_SHARE = 0.2  # a new pack waits at most so much of the time for which there was none
_PRIORITY: tuple[Split, ...] = ("eval", "train")


@dataclass(frozen=True, slots=True)
class ReceivedPack:
    """A pack to generate, held until its delivery is settled."""

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
        """Prepare; once ``stop`` is set, `take` returns None. ``period_s`` returns the period of the heartbeats."""
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
        """Return the next pack, or None when the worker stops. Raises MissingStream when the stream does not exist."""
        async with self._taking:
            self._idle_since = time.monotonic()
            while not self._stop.is_set():
                if not self._engine.ready.is_set():
                    await self._requeue_arrived()  # for a worker whose engine is ready
                    await _first(self._engine.ready.wait(), self._stop.wait())
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
            await _first(asyncio.sleep(seconds * random.uniform(0.8, 1.0)), self._stop.wait())  # noqa: S311  keeps no secret
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


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
