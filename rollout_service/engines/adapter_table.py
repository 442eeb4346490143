"""The adapters that a server confirmed, their base weights, and how many requests of this worker use each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineRefused, EngineTimeout


@dataclass(slots=True)
class _Entry:
    base: PolicyVersion  # the weights on which it was loaded
    num_requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request names it
    is_leaving: bool = False


class AdapterTable:
    """The adapters of one server that this worker loaded."""

    def __init__(self) -> None:
        """No adapter is loaded yet."""
        self._entries: dict[PolicyVersion, _Entry] = {}

    def __contains__(self, version: object) -> bool:
        """Return True if the server confirmed a version and has not unloaded it since."""
        return version in self._entries

    @property
    def versions(self) -> list[PolicyVersion]:
        """The loaded versions, those that are being unloaded included."""
        return list(self._entries)

    def confirm(self, version: PolicyVersion, base: PolicyVersion) -> None:
        """Note that the server loaded a version's adapter on these base weights."""
        entry = self._entries[version] = _Entry(base)
        entry.idle.set()

    def forget(self, version: PolicyVersion) -> None:
        """Note that the server no longer has it."""
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
