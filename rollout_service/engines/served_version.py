"""The versions that an engine confirmed, as weights of its own and as adapters of them, and whoever waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.versions import PolicyVersion, is_newer


class ServedVersion:
    """Lives on one event loop. Outlasts the engine's process: a new one is given again what is here."""

    def __init__(self) -> None:
        """Nothing is served before the first `confirm`."""
        self.base: PolicyVersion | None = None  # the weights of its own
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
        """Note that the engine's weights are ``version`` now; it may be an older one than before.

        Adapters of other weights are gone: they change those, and no others.
        """
        if version != self.base:
            self._adapters.clear()
        self.base = version
        self._tell()

    def confirm_adapter(self, version: PolicyVersion, folder: Path) -> None:
        """Note that the engine serves an adapter besides."""
        self._adapters[version] = folder
        self._tell()

    def forget_adapter(self, version: PolicyVersion) -> None:
        """Note that it does not need an adapter any more."""
        self._adapters.pop(version, None)

    async def reaches(self, version: PolicyVersion) -> None:
        """Wait until ``version`` or a newer one is served."""
        while is_newer(version, self.value):
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
