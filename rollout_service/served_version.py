"""The version that an engine confirmed last, and whoever waits for one."""

from __future__ import annotations

import asyncio

from protocol.versions import PolicyVersion, is_newer


class ServedVersion:
    """Lives on one event loop."""

    def __init__(self) -> None:
        """Nothing is served before the first `confirm`."""
        self.value: PolicyVersion | None = None
        self._changed = asyncio.Event()  # replaced by a fresh one at every change

    def confirm(self, version: PolicyVersion) -> None:
        """Note that the engine serves ``version`` now; it may be an older one than before."""
        self.value = version
        self._changed.set()
        self._changed = asyncio.Event()

    async def reaches(self, version: PolicyVersion) -> None:
        """Wait until ``version`` or a newer one is served."""
        while is_newer(version, self.value):
            await self._changed.wait()
