"""The LoRA adapters of one server, whichever engine it runs: which it confirmed, which requests use them, loads and unloads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import adapter_name, version_of
from penstock.rollout_service.errors import EngineRefused, EngineTimeout, WeightsNotApplied


@dataclass(slots=True)
class _Entry:
    base: PolicyVersion  # the weights on which it was loaded
    num_requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request names it
    is_leaving: bool = False


class AdapterTable:
    def __init__(self) -> None:
        self._entries: dict[PolicyVersion, _Entry] = {}

    def __contains__(self, version: object) -> bool:
        """Return True if the server confirmed a version and has not unloaded it since."""
        return version in self._entries

    @property
    def versions(self) -> list[PolicyVersion]:
        """The loaded versions, those that are being unloaded included."""
        return list(self._entries)

    def confirm(self, version: PolicyVersion, base: PolicyVersion) -> None:
        entry = self._entries[version] = _Entry(base)
        entry.idle.set()

    def forget(self, version: PolicyVersion) -> None:
        self._entries.pop(version, None)

    @contextlib.contextmanager
    def using(self, version: PolicyVersion) -> Iterator[PolicyVersion]:
        """Count a request with a version; yields the base weights that it is computed with.

        Raises EngineRefused, before anything is sent, for a version that is not loaded: SGLang reloads an unloaded
        adapter from its last folder when a request names it.
        """
        entry = self._entries.get(version)
        if entry is None or entry.is_leaving:
            have = ", ".join(map(str, self._entries)) or "none"
            raise EngineRefused(f"the adapter of version {version} is not loaded; loaded are: {have}")
        entry.num_requests += 1
        entry.idle.clear()
        try:
            yield entry.base
        finally:
            entry.num_requests -= 1
            if not entry.num_requests:
                entry.idle.set()

    async def leave(self, version: PolicyVersion, deadline_s: float) -> None:
        """Refuse a version to new requests and wait for those under way; raises EngineTimeout when they take too long."""
        entry = self._entries[version]
        entry.is_leaving = True
        try:
            async with asyncio.timeout(deadline_s):
                await entry.idle.wait()
        except TimeoutError:
            raise EngineTimeout(
                f"{entry.num_requests} requests still use the adapter of version {version} after {deadline_s:g} s"
            ) from None


class AdapterCalls(Protocol):
    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter; raises WeightsNotApplied when the server refuses it, or does not confirm it."""
        ...

    async def unload(self, name: str) -> None: ...

    async def list_names(self) -> list[object]: ...


class AdapterLoader:
    """The adapters of one server. Loads and unloads run one at a time; requests continue meanwhile."""

    def __init__(
        self,
        url: str,
        calls: AdapterCalls,
        served_version: Callable[[], Awaitable[PolicyVersion | None]],
        *,
        request_deadline_s: float,
    ) -> None:
        self.table = AdapterTable()
        self.turn = asyncio.Lock()  # also held while base weights are loaded
        self._url = url
        self._calls = calls
        self._served_version = served_version
        self._request_deadline_s = request_deadline_s

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        async with self.turn:
            if version in self.table:
                return
            base = await self._served_version()
            if base is None:
                raise WeightsNotApplied(
                    f"{self._url} serves weights without a policy version; load weights before adapter {version}"
                )
            await self._calls.load(adapter_name(version), folder)
            self.table.confirm(version, base)

    async def unload(self, version: PolicyVersion) -> None:
        """Unload a version's adapter once no request uses it; raises EngineTimeout when requests use it too long."""
        if version not in self.table:
            return
        await self.table.leave(version, self._request_deadline_s)
        async with self.turn:
            if version in self.table:
                await self._calls.unload(adapter_name(version))
                self.table.forget(version)

    async def drop_all(self) -> None:
        """Unload every policy version's adapter that the server has, once unused."""
        for version in self.table.versions:
            await self.table.leave(version, self._request_deadline_s)
        async with self.turn:
            for version in await self.listed():
                await self._calls.unload(adapter_name(version))
            for version in self.table.versions:
                self.table.forget(version)

    async def forget_lost(self) -> None:
        async with self.turn:
            have = await self.listed()
            for version in self.table.versions:
                if version not in have:
                    self.table.forget(version)

    async def listed(self) -> set[PolicyVersion]:
        return {version for name in await self._calls.list_names() if (version := version_of(name)) is not None}
