"""Where the next pack comes from: the evaluation queue first, then the training queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.protocol.facts import Split, TaskIssued
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.rollout_service.engines.engine import Engine

_FETCH_S = 1.0  # a fetch that NATS never answers, because it was killed, costs this much
_ORDER: tuple[Split, ...] = ("eval", "train")


@dataclass(frozen=True, slots=True)
class Order:
    """A pack to be generated, held until it is settled."""

    split: Split
    delivery: Delivery[TaskIssued]

    @property
    def pack_id(self) -> str:
        """Name of the pack."""
        return self.delivery.fact.pack_id


class TaskSource:
    """Hands packs to whoever is free. Nothing is fetched while everybody is busy or the engine is down."""

    def __init__(self, inboxes: Mapping[Split, Inbox[TaskIssued]], engine: Engine, stop: asyncio.Event) -> None:
        """``stop`` ends all waiting: `take` then returns None."""
        self._inboxes: dict[Split, Inbox[TaskIssued]] = {s: inboxes[s] for s in _ORDER if s in inboxes}
        self._engine = engine
        self._stop = stop
        self._turn = asyncio.Lock()
        self._fetches: dict[Split, asyncio.Future[list[Delivery[TaskIssued]]]] = {}

    @property
    def num_held(self) -> int:
        """Packs fetched and not yet settled."""
        return sum(inbox.num_held for inbox in self._inboxes.values())

    async def take(self) -> Order | None:
        """Return the next pack, or None when the worker stops. Raises MissingStream when the queue is gone."""
        async with self._turn:
            while not self._stop.is_set():
                if not self._engine.ready.is_set():
                    await self._give_back_arrived()  # somebody whose engine is well can have it
                    await _first(self._engine.ready.wait(), self._stop.wait())
                    continue
                order = self._arrived()
                if order is not None:
                    return order
                for split, inbox in self._inboxes.items():
                    if split not in self._fetches:
                        self._fetches[split] = asyncio.ensure_future(inbox.fetch(1, _FETCH_S))
                await asyncio.wait(self._fetches.values(), return_when=asyncio.FIRST_COMPLETED)
        return None

    async def close(self) -> None:
        """Give back what arrives too late to be worked on."""
        if self._fetches:
            await asyncio.wait(self._fetches.values())
        await self._give_back_arrived()

    async def _give_back_arrived(self) -> None:
        while (order := self._arrived()) is not None:
            await order.delivery.give_back(0.0)

    def _arrived(self) -> Order | None:
        for split in self._inboxes:
            fetch = self._fetches.get(split)
            if fetch is not None and fetch.done():
                del self._fetches[split]
                for delivery in fetch.result():
                    return Order(split, delivery)
        return None


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
