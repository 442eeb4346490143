"""An event loop in a separate thread, such as that of the NATS client, and the results of its coroutines for other threads.

A training step of thirty seconds cannot stop heartbeats, keep-alives or acknowledgements. Every call of a `CallThread` returns a `Pending`:
threads call ``.wait()``, coroutines ``await`` it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from penstock.protocol.errors import BusUnreachable

T = TypeVar("T")

_STOP_S = 5.0
_LOOP_GRACE_S = 30.0  # after the deadline of a call and this, its thread counts as stuck
_DRAIN_S = 8.0


class LoopThread:
    """A daemon thread that runs one event loop until `stop`.

    Attributes:
        loop: The event loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self, action: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; cancelling the future cancels it. Raises RuntimeError after `stop`."""
        return asyncio.run_coroutine_threadsafe(action, self.loop)

    @contextlib.asynccontextmanager
    async def inside(self, block: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Enter and leave ``block`` on the loop, around a block of another loop."""
        entered = contextlib.AsyncExitStack()
        value = await asyncio.wrap_future(self.start(entered.enter_async_context(block)))
        try:
            yield value
        finally:
            await asyncio.wrap_future(self.start(entered.aclose()))

    def stop(self, wait_s: float = _STOP_S) -> None:
        """Cancel what runs, close the loop and end the thread; idempotent.

        A thread in which a function does not return within ``wait_s`` is left to the end of the process.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(wait_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_S))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class Pending(Generic[T]):
    __slots__ = ("_deadline_s", "_future", "_what")

    def __init__(self, future: Future[T], what: str, deadline_s: float) -> None:
        """Use `CallThread.call` instead."""
        self._future = future
        self._what = what
        self._deadline_s = deadline_s

    def wait(self) -> T:
        try:
            return self._future.result(self._deadline_s)
        except TimeoutError:
            if self._future.done():  # raised by the call itself
                raise
            raise BusUnreachable(
                f"{self._what} did not return within {self._deadline_s:.0f} s; the bus's thread is stuck or closed"
            ) from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def done(self) -> bool:
        return self._future.done()


class CallThread(LoopThread):
    """A thread with an event loop that takes calls until it is closed, which cancels them."""

    def __init__(self, name: str) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_closing = False
        super().__init__(name)

    def call(self, action: Coroutine[Any, Any, T], what: str, deadline_s: float) -> Pending[T]:
        if self.is_closing:
            action.close()
            raise BusUnreachable(f"{what}: the bus is closed")
        return Pending(self.start(self._called(action, what)), what, deadline_s + _LOOP_GRACE_S)

    def spawn(self, action: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task of the loop, on which this is called, until it returns or the thread is closed."""
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Cancel all calls and tasks, run ``drain``, then stop the loop and the thread; idempotent."""
        if self.is_closing:
            return
        self.is_closing = True
        with contextlib.suppress(Exception):
            self.start(self._shut(drain)).result(_DRAIN_S)
        self.stop()

    async def _called(self, action: Coroutine[Any, Any, T], what: str) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await action
        except asyncio.CancelledError:
            if self.is_closing:
                raise BusUnreachable(f"{what}: the bus was closed during the call") from None
            raise
        finally:
            self._tasks.discard(task)

    async def _shut(self, drain: Callable[[], Awaitable[None]]) -> None:
        await _cancel(self._tasks - {asyncio.current_task()})
        await drain()
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})  # the client does not wait for its tasks


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
