"""Which versions the engine can be asked for now: the model it holds, and the adapters upon that model, side by side.

A request names the adapter that samples it, so that every token has exactly that version. An adapter stays for as long
as a request uses it; the follower unloads those that nobody needs any more.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.errors import EngineRefused
from penstock.rollout_service.weights.mirror import MirroredVersion


class ServableVersions:
    """Lives on one event loop; `WeightSwap` says what the engine was given."""

    def __init__(self, engine: Engine) -> None:
        """Begin with nothing; ``on_idle`` is called when an adapter has lost its last request."""
        self.model: PolicyVersion | None = None
        self.adapters: set[PolicyVersion] = set()
        self.on_idle: Callable[[], None] = lambda: None
        self._engine = engine
        self._uses: Counter[PolicyVersion] = Counter()

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest adapter; None while the model itself is served."""
        found = None
        for version in self.adapters:
            if is_newer(version, found):
                found = version
        return found

    def took_model(self, version: PolicyVersion) -> None:
        """Note that the engine holds a model now; what sat upon the one before is gone."""
        self.model = version
        self.adapters.clear()

    def fits(self, mirrored: MirroredVersion) -> bool:
        """Say whether a version can be served beside all others: it is the model that the engine holds, or sits upon it."""
        return (mirrored.base or mirrored).version == self.model

    def idle(self, needed: Collection[PolicyVersion]) -> list[PolicyVersion]:
        """Return the adapters that no request uses, the newest and those that are ``needed`` left out."""
        spared = {self.newest, *needed}
        return sorted(version for version in self.adapters if not self._uses[version] and version not in spared)

    def sampler(self, pin: PolicyVersion | None) -> VersionSampler:
        """Return whom to ask for samples of exactly ``pin``; None: of whatever is newest when a request begins."""
        return VersionSampler(self, self._engine, pin)

    def adapter_of(self, pin: PolicyVersion | None) -> PolicyVersion | None:
        """Return the adapter that a request names; None: it is sampled by the model itself.

        Raises EngineRefused when a pinned version is not served any more.
        """
        if pin is None:
            return self.newest
        if pin not in self.adapters and pin != self.model:
            raise EngineRefused(f"version {pin} is not served any more: another model was loaded")
        return pin if pin in self.adapters else None

    @contextlib.contextmanager
    def using(self, adapter: PolicyVersion | None) -> Iterator[None]:
        """Keep an adapter loaded inside the block."""
        if adapter is None:
            yield
            return
        self._uses[adapter] += 1
        try:
            yield
        finally:
            self._uses[adapter] -= 1
            if not self._uses[adapter]:
                del self._uses[adapter]
                self.on_idle()


@dataclass(frozen=True, slots=True)
class VersionSampler:
    """Asks the engine of the moment, which may have been restarted at another port."""

    servable: ServableVersions
    engine: Engine
    pin: PolicyVersion | None

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt; see `SglangClient.generate`."""
        adapter = self.servable.adapter_of(self.pin)
        with self.servable.using(adapter):
            return await self.engine.client.generate(prompts, sampling, n, adapter)
