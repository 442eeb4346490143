"""The adapters that requests may name, and how many requests compute with each. For one event loop.

unknown ──load──► listed ──unload: refused to new requests──► unloading: waits for running requests ──► removed
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.rollout_service.embedded_engine.errors import CheckpointRefused

if TYPE_CHECKING:
    from penstock.rollout_service.embedded_engine.model.low_rank import Adapter


class AdapterRegistry:
    """The adapters of one server; loads and unloads run one at a time, while the engine generates."""

    def __init__(
        self,
        read: Callable[[str, str], Adapter],
        drop: Callable[[Adapter], Awaitable[None]],
        *,
        max_loaded: int,
    ) -> None:
        """``read`` reads the adapter of a name and path, in a thread; ``drop`` frees the engine's tensors of one."""
        self._read = read
        self._drop = drop
        self._max_loaded = max_loaded
        self._listed: dict[str, Adapter] = {}
        self._unloading: set[str] = set()
        self._in_use: Counter[int] = Counter()  # by the adapter's number
        self._one_change = asyncio.Lock()
        self._released = asyncio.Condition()

    @property
    def listed(self) -> Mapping[str, Adapter]:
        """The adapters that requests may name, by name; a live view."""
        return MappingProxyType(self._listed)

    async def load(self, name: str, path: str) -> None:
        """Read an adapter and list it under a name; raises CheckpointRefused, having changed nothing."""
        if name in self._unloading:
            raise CheckpointRefused(
                f"adapter {name} is being unloaded: requests with it are still running; retry once they have ended"
            )
        async with self._one_change:
            if name in self._listed:
                raise CheckpointRefused(
                    f"adapter {name} is already loaded, from {self._listed[name].path}; unload it first"
                )
            if len(self._listed) >= self._max_loaded:
                raise CheckpointRefused(
                    f"{len(self._listed)} adapters are loaded, and --max-loaded-loras is {self._max_loaded}; unload one"
                )
            self._listed[name] = await asyncio.to_thread(self._read, name, path)

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests, wait for running ones, remove it; raises CheckpointRefused."""
        adapter = self._listed.pop(name, None)
        if adapter is None:
            raise CheckpointRefused(f"adapter {name} is not loaded; loaded are: {', '.join(self._listed) or 'none'}")
        self._unloading.add(name)
        try:
            async with self._released:
                await self._released.wait_for(lambda: not self._in_use[adapter.number])
            await self._drop(adapter)
        finally:
            self._unloading.discard(name)

    def hold(self, adapters: Iterable[Adapter | None]) -> Callable[[], Awaitable[None]]:
        """Count a request with these adapters; return what must be awaited when it has ended."""
        numbers = {adapter.number for adapter in adapters if adapter is not None}
        self._in_use.update(numbers)

        async def release() -> None:
            async with self._released:
                self._in_use.subtract(numbers)
                self._released.notify_all()

        return release
