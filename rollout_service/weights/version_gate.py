"""Admit ordinary generation and weight swaps while evaluations pin exact versions.

Ordinary generation accepts any version that is served; `engine_client.py` defines what happens to it during a swap. A *pin*
holds one version while an evaluation samples with it: swaps wait. Ordinary generation waits too while the pinned version is
older than the newest, since its samples would be stale at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from penstock.protocol.versions import PolicyVersion

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
    async def swap(self) -> AsyncIterator[None]:
        """Hold the right to load the newest version, once no version is pinned; then admit ordinary generation."""
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
            self._serves_older = False
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
