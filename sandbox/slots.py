"""A bounded number of sandboxes that work at the same time, each killable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import structlog

from penstock.sandbox.zygote_command import SandboxError

log = structlog.get_logger("sandbox")

_TRIES = 2
ResultT = TypeVar("ResultT")


class Stoppable(Protocol):
    def stop(self) -> None:
        """Make the thread that works in it raise SandboxError soon; called from another thread."""
        ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """Kill its processes; they start again with the next program."""
        ...


SlotT = TypeVar("SlotT", bound=Stoppable)


class Slots(Generic[SlotT]):
    """Slots that are lent to one caller at a time. For one event loop. Call `close` at the end."""

    def __init__(self, slots: Sequence[SlotT]) -> None:
        self.all = tuple(slots)
        self._idle: asyncio.LifoQueue[SlotT] = asyncio.LifoQueue()
        for slot in self.all:
            self._idle.put_nowait(slot)
        # The kernel kills a zygote with the thread that started it, so the threads are kept as long as the slots.
        self._threads = ThreadPoolExecutor(len(self.all), thread_name_prefix="sandbox")

    async def run(self, work: Callable[[SlotT], ResultT]) -> ResultT:
        """Wait for a slot, and call ``work`` with it on a thread; raises SandboxError after a second try.

        A caller that is cancelled waits until its processes are killed.
        """
        slot = await self._idle.get()
        try:
            for tried in range(1, _TRIES + 1):
                try:
                    return await self._in_thread(slot, work)
                except SandboxError as err:
                    log.warning("sandbox failed", error=str(err), tried=tried)
                    slot.kill()
                    if tried == _TRIES:
                        raise
            raise AssertionError("unreachable")
        finally:
            self._idle.put_nowait(slot)

    async def _in_thread(self, slot: SlotT, work: Callable[[SlotT], ResultT]) -> ResultT:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, slot)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            slot.stop()
            await asyncio.wait([running])  # ends soon: its zygotes were killed
            running.exception()  # retrieved, so that asyncio does not report it
            slot.resume()
            raise

    async def close(self) -> None:
        for slot in self.all:
            slot.stop()
        await asyncio.to_thread(self._threads.shutdown)
        for slot in self.all:
            slot.kill()
