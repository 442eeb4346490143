"""How many packs this process works on, and how many it holds; pure but for the event that a slot became free."""

from __future__ import annotations

import asyncio
import contextlib


class WorkSlots:
    """Slots for packs in work. A pack that only waits for another process gives its slot back and is still held."""

    def __init__(self, num_slots: int, max_packs: int) -> None:
        """``num_slots`` packs may be worked on at a time, ``max_packs`` may be held, those that wait included."""
        self._num_slots = num_slots
        self._max_packs = max_packs
        self._working: set[int] = set()
        self._held = 0
        self._changed = asyncio.Event()

    @property
    def free(self) -> int:
        return max(0, min(self._num_slots - len(self._working), self._max_packs - self._held))

    def acquire(self, sequence: int) -> None:
        self._working.add(sequence)
        self._held += 1

    def release(self, sequence: int) -> None:
        """Take the slot back: all that the pack still waits for is outside this process. Idempotent."""
        self._working.discard(sequence)
        self._changed.set()

    def finish(self, sequence: int) -> None:
        self._held -= 1
        self.release(sequence)

    async def wait_for_change(self, wait_s: float) -> None:
        # not wait_for: in Python 3.11 it swallows a cancellation that comes with the change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._changed.clear()
