"""Loops that each take a pack, have it generated and take the next: a fixed number, or as many as the engine makes use of.

With a number that follows the engine (`pack_limit.py`), a loop is added when the limit grows, and ends after its pack when
there are more loops than the limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.packs.pack_limit import SAMPLE_S, EngineLoad, PackLimit
from penstock.rollout_service.packs.task_source import ReceivedPack, TaskSource

log = structlog.get_logger("rollout.pack_loops")

_NEEDED = ("engine_generated_tokens", "engine_running", "engine_queued")
_MOST_WITHOUT = 30  # samples in a row without these figures, after which a warning says so


class PackLoops:
    """The loops of one worker; for one event loop."""

    def __init__(
        self, tasks: TaskSource, engine: Engine, work: Callable[[ReceivedPack], Awaitable[None]], packs_in_flight: int
    ) -> None:
        """Prepare `run`: ``work`` settles a pack. ``packs_in_flight`` = 0: as many as are best for ``engine``."""
        self._tasks = tasks
        self._engine = engine
        self._work = work
        self._follows = None if packs_in_flight else PackLimit()
        self.limit = self._follows.value if self._follows else packs_in_flight
        self._num_loops = 0
        self._num_held = 0
        self._sequences_per_pack = 1
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Work until `TaskSource.take` returns None; raises what ``work`` raises."""
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
