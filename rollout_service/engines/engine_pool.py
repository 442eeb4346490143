"""Several engines as one: each group goes to the engine with the fewest pending tokens, a version to all of them.

A group's samples stay together, also where other engines are idle: their prompt is computed once, and servers that were started with
one seed (vLLM's default is 0) would sample the same completions in two parts of a group. One call is spread over the ready engines
that serve the newest version: an engine that still drains before it can load gets no new requests.

The turns of an episode are asked of one engine, which keeps what it computed. An episode is placed with its first turn, on the
engine that plays the fewest, since one that waits for a tool has no pending tokens; it moves when its engine cannot be asked, or
others serve a newer version: then nothing that was computed is of use any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.protocol.groups import Sampling
from penstock.protocol.heartbeats import cpu_seconds
from penstock.protocol.versions import PolicyVersion, newest_of, oldest_of
from penstock.rollout_service.engines.completion import Completion, EngineChecksum
from penstock.rollout_service.engines.engine import Engine, first_of
from penstock.rollout_service.engines.engine_client import (
    Generates,
    KeptCompletions,
    UpdateMode,
    able_to_abandon,
    aggregate_metrics,
)
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.engines.weight_changes import NoChanges, WeightChanges
from penstock.rollout_service.errors import EngineDisagrees, EngineError, EngineUnreachable, TaskRefused

T = TypeVar("T")


class EnginePool:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self.num_servers = len(self._engines)
        self.client = _Router(self._engines)
        self.ready = _AnyReady(self._engines)

    @property
    def version(self) -> PolicyVersion | None:
        """The oldest version that one of them serves; None before each has one."""
        return oldest_of([engine.version for engine in self._engines])

    @property
    def applied(self) -> set[PolicyVersion]:
        return set().union(*(engine.applied for engine in self._engines))

    async def prepare(self) -> None:
        await asyncio.gather(*(engine.prepare() for engine in self._engines))

    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Load a folder into all, or where some serve this version, into the others."""
        behind = [one for one in self._engines if one.version != version or one.is_released] or self._engines
        await _all_of(engine.load(folder, version, mode) for engine in behind)

    async def patch(self, version: PolicyVersion, mode: UpdateMode = "drain") -> bool:
        """Change all, or none: where one refuses, the others return to their folders."""
        outcomes = await _all_of(engine.patch(version, mode) for engine in self._engines)
        if not all(outcomes):
            await self.withdraw(version, f"another engine of this worker did not take the patch to version {version}")
        return all(outcomes)

    async def keep(self, folder: Path, version: PolicyVersion) -> bool:
        return all(await _all_of(engine.keep(folder, version) for engine in self._engines))

    async def withdraw(self, version: PolicyVersion, reason: str) -> None:
        await _all_of(engine.withdraw(version, reason) for engine in self._engines)

    @property
    def max_changed_share(self) -> float:
        return min(engine.max_changed_share for engine in self._engines)

    @property
    def withdrawn_at(self) -> float:
        return max(engine.withdrawn_at for engine in self._engines)

    async def stage(self, changes: WeightChanges | NoChanges) -> bool:
        """Prepare a change in all; False, and no patch is tried, where one cannot: it would cost the others what they run."""
        return all(await _all_of(engine.stage(changes) for engine in self._engines))

    async def wait_for_version(self, version: PolicyVersion) -> None:
        await first_of(*(engine.wait_for_version(version) for engine in self._engines))

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        await _all_of(engine.load_adapter(folder, version) for engine in self._engines)

    async def unload_adapter(self, version: PolicyVersion) -> None:
        await _all_of(engine.unload_adapter(version) for engine in self._engines)

    @property
    def is_released(self) -> bool:
        return any(engine.is_released for engine in self._engines)

    async def release(self, mode: UpdateMode) -> None:
        await _all_of(engine.release(mode) for engine in self._engines)

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return their common checksum; None when one reports none, or they are sharded differently.

        Raises EngineDisagrees when engines of one layout serve different weights.
        """
        checksums = await asyncio.gather(*(engine.weights_checksum() for engine in self._engines))
        first = checksums[0]
        if first is None or any(checksum is None or checksum.layout != first.layout for checksum in checksums):
            return None
        if any(checksum != first for checksum in checksums):
            raise EngineDisagrees(
                f"the engines of this worker serve different weights as version {self.version}: {checksums}"
            )
        return first

    async def check_health(self) -> None:
        await asyncio.gather(*(engine.check_health() for engine in self._engines))

    async def run(self) -> None:
        """Supervise them; an error of one ends them all."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(engine.run())

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def cpu_seconds(self) -> float:
        process_seconds = cpu_seconds()
        return process_seconds + sum(max(0.0, engine.cpu_seconds() - process_seconds) for engine in self._engines)

    async def figures(self) -> dict[str, float]:
        return aggregate_metrics(await asyncio.gather(*(engine.figures() for engine in self._engines)))


class _Router:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._pending_tokens = [0] * len(engines)  # upper bound for each engine
        self._num_episodes = [0] * len(engines)  # that have their place there

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        adapter: PolicyVersion | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Completion]]:

        async def ask(client: Generates, wanted: Sequence[int]) -> list[list[Completion]]:
            wanted_seeds = None if seeds is None else [seeds[index] for index in wanted]
            return await client.generate([prompts[index] for index in wanted], sampling, n, adapter, wanted_seeds)

        return await self._spread(len(prompts), n * sampling.max_new_tokens, ask)

    @contextlib.contextmanager
    def placed(self) -> Iterator[Generates]:
        place = _Place(self)
        try:
            yield place
        finally:
            self.move(place, None)

    def move(self, place: _Place, to: int | None) -> None:
        if place.number is not None:
            self._num_episodes[place.number] -= 1
        place.number = to
        if to is not None:
            self._num_episodes[to] += 1

    @contextlib.contextmanager
    def client_at(self, place: _Place, cost: int) -> Iterator[Generates]:
        """Yield the client of an episode's engine, or of another one where that cannot be asked; count ``cost`` tokens there."""
        usable = self._usable()
        if place.number not in usable:
            self.move(place, None)
            self.move(place, min(usable, key=lambda one: (self._num_episodes[one], self._pending_tokens[one], one)))
        number = place.number
        assert number is not None
        self._pending_tokens[number] += cost
        try:
            yield self._engines[number].client
        finally:
            self._pending_tokens[number] -= cost

    async def generate_redundantly(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        redundancy: Redundancy,
        adapter: PolicyVersion | None = None,
    ) -> list[KeptCompletions]:

        async def ask(client: Generates, wanted: Sequence[int]) -> list[KeptCompletions]:
            wanted_prompts = [prompts[index] for index in wanted]
            return await able_to_abandon(client).generate_redundantly(wanted_prompts, sampling, redundancy, adapter)

        return await self._spread(len(prompts), redundancy.started * sampling.max_new_tokens, ask)

    async def _spread(
        self, num_prompts: int, cost: int, ask: Callable[[Generates, Sequence[int]], Awaitable[list[T]]]
    ) -> list[T]:
        assigned = self._assign(num_prompts, cost)
        reply_by_index: dict[int, T] = {}

        async def ask_one(number: int, wanted: Sequence[int]) -> None:
            replies = await ask(self._engines[number].client, wanted)
            reply_by_index.update(zip(wanted, replies, strict=True))

        try:
            async with asyncio.TaskGroup() as requests:
                for number, wanted in assigned.items():
                    request = requests.create_task(ask_one(number, wanted))
                    # A callback: the `finally` of a task that is cancelled before it begins never runs.
                    request.add_done_callback(functools.partial(self._end, number, cost * len(wanted)))
        except* (EngineError, TaskRefused) as failures:
            raise failures.exceptions[0] from None
        return [reply_by_index[index] for index in range(num_prompts)]

    def _end(self, number: int, cost: int, _: asyncio.Task[None]) -> None:
        self._pending_tokens[number] -= cost

    def _assign(self, num_prompts: int, cost: int) -> dict[int, list[int]]:
        usable = self._usable()
        assigned: dict[int, list[int]] = {}
        for index in range(num_prompts):
            least_busy = min(usable, key=lambda number: (self._pending_tokens[number], number))
            self._pending_tokens[least_busy] += cost
            assigned.setdefault(least_busy, []).append(index)
        return assigned

    def _usable(self) -> list[int]:
        ready = [number for number, engine in enumerate(self._engines) if engine.ready.is_set()]
        if not ready:
            raise EngineUnreachable(f"none of the {len(self._engines)} engines is ready")
        newest = newest_of(self._engines[number].version for number in ready)
        return [number for number in ready if self._engines[number].version == newest]


class _Place:
    def __init__(self, router: _Router) -> None:
        self.number: int | None = None  # of its engine; None: nothing was asked yet
        self._router = router

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        adapter: PolicyVersion | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        with self._router.client_at(self, len(prompts) * n * sampling.max_new_tokens) as client:
            return await client.generate(prompts, sampling, n, adapter, seeds)


class _AnyReady:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def is_set(self) -> bool:
        return any(engine.ready.is_set() for engine in self._engines)

    async def wait(self) -> bool:
        await first_of(*(engine.ready.wait() for engine in self._engines))
        return True


async def _all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all; raises the error of the first that failed."""
    outcomes: list[T] = []
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        outcomes.append(outcome)
    return outcomes
