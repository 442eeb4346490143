"""Fetch the next pack: from the evaluation queue first, then from the training queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.protocol.facts import Split, TaskIssued
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.rollout_service.engines.engine import Engine

_FETCH_S = 1.0  # the cost of a fetch that NATS, having been killed, never answers
_PRIORITY: tuple[Split, ...] = ("eval", "train")


@dataclass(frozen=True, slots=True)
class ReceivedPack:
    """A pack to generate, held until its delivery is settled."""

    split: Split
    delivery: Delivery[TaskIssued]

    @property
    def pack_id(self) -> str:
        """The pack's id."""
        return self.delivery.fact.pack_id


class TaskSource:
    """The packs of one worker; fetches only while `take` waits and the engine is ready."""

    def __init__(self, inboxes: Mapping[Split, Inbox[TaskIssued]], engine: Engine, stop: asyncio.Event) -> None:
        """Prepare; once ``stop`` is set, `take` returns None."""
        self._inboxes: dict[Split, Inbox[TaskIssued]] = {s: inboxes[s] for s in _PRIORITY if s in inboxes}
        self._engine = engine
        self._stop = stop
        self._taking = asyncio.Lock()
        self._fetches: dict[Split, asyncio.Future[list[Delivery[TaskIssued]]]] = {}

    @property
    def num_held(self) -> int:
        """Packs fetched and not yet settled."""
        return sum(inbox.num_held for inbox in self._inboxes.values())

    async def take(self) -> ReceivedPack | None:
        """Return the next pack, or None when the worker stops. Raises MissingStream when the stream is gone."""
        async with self._taking:
            while not self._stop.is_set():
                if not self._engine.ready.is_set():
                    await self._requeue_arrived()  # for a worker whose engine is ready
                    await _first(self._engine.ready.wait(), self._stop.wait())
                    continue
                received = self._arrived()
                if received is not None:
                    return received
                for split, inbox in self._inboxes.items():
                    if split not in self._fetches:
                        self._fetches[split] = asyncio.ensure_future(inbox.fetch(1, _FETCH_S))
                await asyncio.wait(self._fetches.values(), return_when=asyncio.FIRST_COMPLETED)
        return None

    async def close(self) -> None:
        """Requeue packs that arrive after the end."""
        if self._fetches:
            await asyncio.wait(self._fetches.values())
        await self._requeue_arrived()

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


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
