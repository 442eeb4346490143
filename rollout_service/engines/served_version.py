"""The versions that an engine confirmed, as base weights and as adapters of them, and the tasks that wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.versions import PolicyVersion, is_newer


class ServedVersion:
    """For one event loop. Kept across restarts of the engine: a new process loads what is recorded here."""

    def __init__(self) -> None:
        """Nothing is served before the first `confirm`."""
        self.base: PolicyVersion | None = None  # its base weights
        self._adapters: dict[PolicyVersion, Path] = {}
        self._changed = asyncio.Event()  # replaced by a fresh one at every change

    @property
    def value(self) -> PolicyVersion | None:
        """The newest version, as weights or as an adapter; None before the first."""
        newest = self.base
        for version in self._adapters:
            if is_newer(version, newest):
                newest = version
        return newest

    @property
    def adapters(self) -> Mapping[PolicyVersion, Path]:
        """The folders of the adapters, as they are now."""
        return dict(self._adapters)

    def confirm(self, version: PolicyVersion) -> None:
        """Note that the engine's base weights are ``version``; it may be older than before.

        Adapters of other base weights are forgotten.
        """
        if version != self.base:
            self._adapters.clear()
        self.base = version
        self._notify()

    def confirm_adapter(self, version: PolicyVersion, folder: Path) -> None:
        """Note that the engine also serves an adapter."""
        self._adapters[version] = folder
        self._notify()

    def forget_adapter(self, version: PolicyVersion) -> None:
        """Note that an adapter is no longer needed."""
        self._adapters.pop(version, None)

    async def wait_for_version(self, version: PolicyVersion) -> None:
        """Wait until ``version`` or a newer one is served."""
        while is_newer(version, self.value):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
