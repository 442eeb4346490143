"""Which versions a request may name now: the model that the engine holds, and the adapters of that model.

A request names the adapter that samples it, so every token has exactly that version. An adapter stays loaded while a
request uses it; the follower unloads those that are no longer needed.

Three classes know of loaded adapters, each for a different question and as long as its owner exists:

| question                                                            | owner                           | exists as long as          |
|---------------------------------------------------------------------|---------------------------------|----------------------------|
| Which versions may a request name? Which adapters can be unloaded?  | `ServableVersions`              | the worker                 |
| Which folders is an engine given again after a restart?             | `engines/engine.py`     | the engine, over restarts  |
| What did this server confirm, on which base, for which requests?    | `engines/adapter_loader.py`      | one server process         |

Requests are counted here to find adapters that can be unloaded, over all engines and before a request is sent. The
adapter table counts the requests that one server computes, because a server must finish them before its model changes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.engine_client import (
    Generates,
    KeptCompletions,
    PlacesEpisodes,
    able_to_abandon,
)
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.errors import EngineRefused
from penstock.rollout_service.weights.mirror import MirroredVersion


class ServableVersions:
    """The versions of one worker, changed by `WeightSwap` alone. For one event loop."""

    def __init__(self, engine: Engine) -> None:
        """Start without versions; ``on_unused`` is called when the last request with an adapter has ended."""
        self.model: PolicyVersion | None = None
        self.on_unused: Callable[[], None] = lambda: None
        self._adapters: set[PolicyVersion] = set()
        self._engine = engine
        self._num_requests: Counter[PolicyVersion] = Counter()  # by adapter

    @property
    def adapters(self) -> Set[PolicyVersion]:
        return frozenset(self._adapters)

    @property
    def newest_adapter(self) -> PolicyVersion | None:
        """The newest adapter; None while the model itself is served."""
        best = None
        for version in self._adapters:
            if is_newer(version, best):
                best = version
        return best

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
    def using(self, adapter: PolicyVersion | None) -> Iterator[None]:
        if adapter is None:
            yield
            return
        self._num_requests[adapter] += 1
        try:
            yield
        finally:
            self._num_requests[adapter] -= 1
            if not self._num_requests[adapter]:
                del self._num_requests[adapter]
                self.on_unused()


@dataclass(frozen=True, slots=True)
class VersionSampler:
    """Samples from the engine's current client, which changes when the engine restarts at another port."""

    servable: ServableVersions
    engine: Engine
    pin: PolicyVersion | None
    place: Generates | None = None  # of an episode; None: any engine of the worker

    @contextlib.contextmanager
    def in_episode(self) -> Iterator[VersionSampler]:
        """Return the sampler of one episode, whose requests go to one engine of several."""
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
        with self.servable.using(adapter):
            return await (self.place or self.engine.client).generate(prompts, sampling, n, adapter, seeds)

    async def generate_redundantly(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, redundancy: Redundancy
    ) -> list[KeptCompletions]:
        """Sample more completions of every prompt than are kept; see `GeneratesRedundantly`.

        Raises TaskRefused where the engine's client cannot.
        """
        adapter = self.servable.adapter_of(self.pin)
        with self.servable.using(adapter):
            return await able_to_abandon(self.engine.client).generate_redundantly(
                prompts, sampling, redundancy, adapter
            )
