"""Which adapters a server has confirmed, upon which base, and how many requests of ours compute with each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineRefused, EngineTimeout


@dataclass(slots=True)
class _Entry:
    base: PolicyVersion  # the weights it was loaded upon
    num_requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request names it
    is_leaving: bool = False


class AdapterTable:
    """The adapters of one server, as far as this worker knows."""

    def __init__(self) -> None:
        """None at first."""
        self._entries: dict[PolicyVersion, _Entry] = {}

    def __contains__(self, version: object) -> bool:
        """Say whether the server confirmed a version, and was not told to unload it since."""
        return version in self._entries

    @property
    def versions(self) -> list[PolicyVersion]:
        """What requests may name, and what is about to go."""
        return list(self._entries)

    def confirm(self, version: PolicyVersion, base: PolicyVersion) -> None:
        """Note that the server has a version's adapter, upon these base weights."""
        entry = self._entries[version] = _Entry(base)
        entry.idle.set()

    def forget(self, version: PolicyVersion) -> None:
        """Note that the server does not have it any more."""
        self._entries.pop(version, None)

    @contextlib.contextmanager
    def using(self, version: PolicyVersion) -> Iterator[PolicyVersion]:
        """Count a request with a version; yields the base weights that it is computed with.

        Raises EngineRefused, before anything is sent, for a version that the server does not have: SGLang loads an
        adapter again, from wherever it was, when a request names one that was unloaded.
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
