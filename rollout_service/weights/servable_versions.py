"""Which versions a request may name now: the model that the engine holds, and the adapters of that model; and when generation may start.

A request names the adapter that samples it, so every token has exactly that version. An adapter stays loaded while a
request uses it; the follower unloads those that are no longer needed.

Three classes know of loaded adapters, each for a different question and as long as its owner exists:

| question                                                            | owner                           | exists as long as          |
|---------------------------------------------------------------------|---------------------------------|----------------------------|
| Which versions may a request name? Which adapters can be unloaded?  | `ServableVersions`              | the worker                 |
| Which folders does an engine receive again after a restart?         | `engines/engine.py`             | the engine, over restarts  |
| What did this server confirm, on which base, for which requests?    | `engines/completion_sampler.py` | one server process         |

Requests are counted here to find adapters that can be unloaded, over all engines and before a request is sent. The
adapter table counts the requests that one server computes, because a server must finish them before its model changes.

Ordinary generation accepts any version that is served; `engine_client.py` defines what happens to it during a swap. A *pin* holds one version
while an evaluation samples with it: swaps wait. Ordinary generation waits too while the pinned version is older than the newest, since its
samples would be stale at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, newest_of
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.engine_client import Generates, KeptCompletions, PlacesEpisodes, able_to_abandon
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.errors import EngineRefused
from penstock.rollout_service.weights.mirror import MirroredVersion

T = TypeVar("T", PolicyVersion, int)
# The next pack of an evaluation usually follows at once: a swap waits this long for it, unless ordinary generation waits.
LINGER_S = 0.2


class VersionGate:
    """For one event loop; state changes without awaiting, so a cancelled waiter changes nothing."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._pin: PolicyVersion | None = None
        self._num_pinned = 0
        self._num_waiting_pins = 0
        self._num_waiting_ordinary = 0
        self._swapping = False
        self._serves_older = False
        self._released_at = -linger_s
        self._changed = asyncio.Event()

    @property
    def pin(self) -> PolicyVersion | None:
        """The version that is held now."""
        return self._pin if self._num_pinned else None

    @property
    def serves_older(self) -> bool:
        """True from a pin to an older version until the swap to the newest: ordinary generation waits."""
        return self._serves_older

    @contextlib.contextmanager
    def ordinary_waiting(self) -> Iterator[None]:
        """Count ordinary generation as waiting inside the block, so that a swap does not linger.

        The evaluation queue is read first, so it was empty: a swap need not wait for the evaluation's next pack.
        """
        self._num_waiting_ordinary += 1
        self._notify()
        try:
            yield
        finally:
            self._num_waiting_ordinary -= 1

    async def wait_for_ordinary(self) -> None:
        await self._until(lambda: not self._serves_older)

    @contextlib.asynccontextmanager
    async def pinned(
        self, version: PolicyVersion, load: Callable[[], Awaitable[None]], *, is_older: Callable[[], bool]
    ) -> AsyncIterator[None]:
        """Hold ``version``; ``load`` makes the engine serve it and is called while no other swap runs.

        ``is_older`` returns True if the version is older than the newest.
        """
        self._num_waiting_pins += 1
        try:
            await self._until(lambda: not self._swapping and (self._num_pinned == 0 or self._pin == version))
            self._pin = version
            self._num_pinned += 1
        finally:
            self._num_waiting_pins -= 1
            self._notify()
        try:
            self._serves_older = is_older()
            with self._swap():
                await load()
            yield
        finally:
            self._num_pinned -= 1
            self._released_at = time.monotonic()
            self._notify()

    @contextlib.asynccontextmanager
    async def swap(self, is_newest: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Hold the right to load the newest version, once no version is pinned; then admit ordinary generation if it ``is_newest``."""
        while True:
            await self._until(lambda: not self._swapping and self._num_pinned == 0 and self._num_waiting_pins == 0)
            rest = self._released_at + self._linger_s - time.monotonic()
            if rest <= 0 or self._num_waiting_ordinary:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._changed.wait()
        with self._swap():
            yield
            self._serves_older = self._serves_older and not is_newest()
        self._notify()

    @contextlib.contextmanager
    def _swap(self) -> Iterator[None]:
        self._swapping = True
        try:
            yield
        finally:
            self._swapping = False
            self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ServableVersions:
    def __init__(self, engine: Engine) -> None:
        self.model: PolicyVersion | None = None
        self.on_unused: Callable[[], None] = lambda: None
        self._adapters: set[PolicyVersion] = set()
        self._engine = engine
        self._num_requests: Counter[PolicyVersion] = Counter()  # by adapter
        self._running: Counter[int] = Counter()  # requests by the tokens that a completion of theirs may have

    @property
    def adapters(self) -> Set[PolicyVersion]:
        return frozenset(self._adapters)

    @property
    def newest_adapter(self) -> PolicyVersion | None:
        """The newest adapter; None while the model itself is served."""
        return newest_of(self._adapters)

    @property
    def longest_running(self) -> int:
        """The most tokens that a completion may have which is being sampled now; 0: none is."""
        return max(self._running, default=0)

    def set_model(self, version: PolicyVersion) -> None:
        """Record that the engine holds this model now; adapters of the one before are gone."""
        self.model = version
        self._adapters.clear()

    def add_adapter(self, version: PolicyVersion) -> None:
        self._adapters.add(version)

    def remove_adapter(self, version: PolicyVersion) -> None:
        self._adapters.discard(version)

    def shares_model(self, mirrored: MirroredVersion) -> bool:
        return (mirrored.base or mirrored).version == self.model

    def unused_adapters(self, needed: Collection[PolicyVersion]) -> list[PolicyVersion]:
        """Return the adapters that no request uses, except the newest and those in ``needed``."""
        kept = {self.newest_adapter, *needed}
        return sorted(version for version in self._adapters if not self._num_requests[version] and version not in kept)

    def sampler(self, pin: PolicyVersion | None) -> VersionSampler:
        """Return a sampler of exactly version ``pin``; None: of the newest version when a request starts."""
        return VersionSampler(self, self._engine, pin)

    def adapter_of(self, pin: PolicyVersion | None) -> PolicyVersion | None:
        """Return the adapter that a request names; None: the model itself samples it.

        Raises EngineRefused when a pinned version is not served any more.
        """
        if pin is None:
            return self.newest_adapter
        if pin not in self._adapters and pin != self.model:
            raise EngineRefused(f"version {pin} is not served any more: another model was loaded")
        return pin if pin in self._adapters else None

    @contextlib.contextmanager
    def using(self, adapter: PolicyVersion | None, sampling: Sampling) -> Iterator[None]:
        """Count a request in the block, with the adapter that it names and the length that it allows."""
        with _counted(self._running, sampling.max_new_tokens):
            if adapter is None:
                yield
                return
            try:
                with _counted(self._num_requests, adapter):
                    yield
            finally:
                if adapter not in self._num_requests:
                    self.on_unused()


@contextlib.contextmanager
def _counted(counter: Counter[T], key: T) -> Iterator[None]:
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


@dataclass(frozen=True, slots=True)
class VersionSampler:
    """Samples from the engine's current client, which changes when the engine restarts at another port."""

    servable: ServableVersions
    engine: Engine
    pin: PolicyVersion | None
    place: Generates | None = None  # of an episode; None: any engine of the worker

    @contextlib.contextmanager
    def in_episode(self) -> Iterator[VersionSampler]:
        client = self.engine.client
        if not isinstance(client, PlacesEpisodes):
            yield self
            return
        with client.placed() as place:
            yield replace(self, place=place)

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, *, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        adapter = self.servable.adapter_of(self.pin)
        with self.servable.using(adapter, sampling):
            return await (self.place or self.engine.client).generate(prompts, sampling, n, adapter, seeds)

    async def generate_redundantly(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, redundancy: Redundancy
    ) -> list[KeptCompletions]:
        """Sample more completions of every prompt than are kept; see `GeneratesRedundantly`.

        Raises TaskRefused where the engine's client cannot.
        """
        adapter = self.servable.adapter_of(self.pin)
        with self.servable.using(adapter, sampling):
            client = able_to_abandon(self.engine.client)
            return await client.generate_redundantly(prompts, sampling, redundancy, adapter)
