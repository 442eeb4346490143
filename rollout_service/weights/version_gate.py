"""Who may generate and who may swap weights, when evaluation wants one exact version.

Ordinary generation takes whatever version is served; what runs during a swap is the update mode's
to say (`update_mode.py`). A *pin* holds one version for as long as somebody evaluates with it: swaps wait, and so does
ordinary generation while an older version than the newest is served, since its samples would be
stale from birth.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from penstock.protocol.versions import PolicyVersion

# The next pack of an evaluation is usually under way; do not swap in between, unless ordinary generation waits for it.
LINGER_S = 0.2


class VersionGate:
    """Lives on one event loop; state changes without awaiting, so a cancelled waiter leaves no trace."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        """Start with nothing pinned."""
        self._linger_s = linger_s
        self._pin: PolicyVersion | None = None
        self._num_pinned = 0
        self._num_wanting = 0
        self._num_ordinary = 0
        self._swapping = False
        self._set_back = False
        self._released_at = -linger_s
        self._changed = asyncio.Event()

    @property
    def held_back(self) -> bool:
        """Ordinary generation waits until somebody swaps to the newest version."""
        return self._set_back

    @contextlib.contextmanager
    def ordinary(self) -> Iterator[None]:
        """Say that ordinary generation waits, for as long as the block lasts.

        The queue of evaluations was found empty then, since it is read first: a swap need not linger for its next pack.
        """
        self._num_ordinary += 1
        self._notify()
        try:
            yield
        finally:
            self._num_ordinary -= 1

    async def free(self) -> None:
        """Wait until ordinary generation may start."""
        await self._until(lambda: not self._set_back)

    @contextlib.asynccontextmanager
    async def pinned(
        self, version: PolicyVersion, load: Callable[[], Awaitable[None]], *, sets_back: Callable[[], bool]
    ) -> AsyncIterator[None]:
        """Hold ``version``; ``load`` makes the engine serve it and is called when nobody else swaps.

        ``sets_back`` says whether the version is older than the newest.
        """
        self._num_wanting += 1
        try:
            await self._until(lambda: not self._swapping and (self._num_pinned == 0 or self._pin == version))
            self._pin = version
            self._num_pinned += 1
        finally:
            self._num_wanting -= 1
            self._notify()
        try:
            self._set_back = sets_back()
            with self._swap():
                await load()
            yield
        finally:
            self._num_pinned -= 1
            self._released_at = time.monotonic()
            self._notify()

    @contextlib.asynccontextmanager
    async def swap(self) -> AsyncIterator[None]:
        """Hold the right to load the newest version; ends what pins have set back."""
        while True:
            await self._until(lambda: not self._swapping and self._num_pinned == 0 and self._num_wanting == 0)
            rest = self._released_at + self._linger_s - time.monotonic()
            if rest <= 0 or self._num_ordinary:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._changed.wait()
        with self._swap():
            yield
            self._set_back = False
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
