"""A thread with an event loop, and the results of its coroutines for other threads.

The NATS client runs here, so a training step of thirty seconds cannot stop heartbeats, keep-alives or
acknowledgements. Every call returns a `Pending`: threads call ``.wait()``, coroutines ``await`` it.

The standard library's way from one loop to another (`run_coroutine_threadsafe`, `wrap_future`) chains three futures for
a call, and writes to a pipe for each way of it. Here a call is one object, and a loop that was woken is not woken again
before it has looked.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from penstock.protocol.errors import BusUnreachable

T = TypeVar("T")

_LOOP_GRACE_S = 30.0  # after its own deadline and this, the thread of a call counts as stuck
_DRAIN_S = 8.0
_JOIN_S = 5.0


class _Mailbox:
    """Callbacks that any thread gives to one event loop; they run in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._callbacks: collections.deque[Callable[[], object]] = collections.deque()
        self._is_woken = False

    def post(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop; raises RuntimeError when the loop is closed."""
        self._callbacks.append(callback)  # before the flag is read: `_run` clears the flag before it takes callbacks
        if not self._is_woken:
            self._wake()

    def _wake(self) -> None:
        if (loop := self._loop()) is None:
            return
        self._is_woken = True
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # closed; the next callback is to fail in the same way, not to be waited for
            self._is_woken = False
            raise

    def _run(self) -> None:
        self._is_woken = False
        try:
            while self._callbacks:
                self._callbacks.popleft()()
        finally:
            if self._callbacks:  # one has raised, which the loop reports; the others still run
                self._wake()


_MAILBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()


def _own_mailbox() -> _Mailbox:
    """Return the mailbox of the loop that runs in this thread."""
    loop = asyncio.get_running_loop()
    if (found := _MAILBOXES.get(loop)) is None:
        found = _MAILBOXES[loop] = _Mailbox(loop)
    return found


class Pending(Generic[T]):
    """The result of a call that runs on the bus's thread."""

    __slots__ = ("_answer", "_deadline_s", "_error", "_guard", "_is_done", "_task", "_thread", "_wakers", "_what")

    def __init__(self, thread: _Mailbox, what: str, deadline_s: float) -> None:
        """Prepare a call that `LoopThread` starts."""
        self._thread = thread
        self._what = what
        self._deadline_s = deadline_s
        self._guard = threading.Lock()
        self._is_done = False
        self._answer: T | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._wakers: list[Callable[[], object]] = []

    def wait(self) -> T:
        """Block this thread until the result is available; raises what the call raised."""
        woken = threading.Event()
        if self._is_awaited_by(woken.set) and not woken.wait(self._deadline_s):
            raise BusUnreachable(
                f"{self._what} did not return within {self._deadline_s:.0f} s; the bus's thread is stuck or closed"
            )
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._is_done:
            mailbox, woken = _own_mailbox(), asyncio.get_running_loop().create_future()
            if self._is_awaited_by(lambda: mailbox.post(lambda: woken.done() or woken.set_result(None))):
                try:
                    yield from woken
                except asyncio.CancelledError:
                    with contextlib.suppress(RuntimeError):  # the bus was closed meanwhile, and the call with it
                        self._thread.post(self._cancel)
                    raise
        return self._outcome()

    def done(self) -> bool:
        """Return True if the result is available."""
        return self._is_done

    def start(self, task: asyncio.Task[None]) -> None:
        """Say which task makes the result; on the bus's thread."""
        self._task = task

    def finish(self, answer: T | None, error: BaseException | None) -> None:
        """Set the result, and wake those that wait for it; on the bus's thread."""
        with self._guard:
            self._answer, self._error, self._is_done = answer, error, True
            self._task = None
        for waker in self._wakers:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                waker()

    def _is_awaited_by(self, waker: Callable[[], object]) -> bool:
        """Have ``waker`` called with the result; return False if there is one already."""
        with self._guard:
            if not self._is_done:
                self._wakers.append(waker)
            return not self._is_done

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]  # what the call returned

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """A daemon thread that runs one event loop until it is closed, which cancels its tasks."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._mailbox = _Mailbox(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    def start(self) -> None:
        """Start the thread; calls are refused before."""
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def call(self, action: Coroutine[Any, Any, T], what: str, deadline_s: float) -> Pending[T]:
        """Run a coroutine on the loop; raises BusUnreachable when the thread is closed."""
        if self._closing or not self._thread.is_alive():
            action.close()
            raise BusUnreachable(f"{what}: the bus is closed")
        pending: Pending[T] = Pending(self._mailbox, what, deadline_s + _LOOP_GRACE_S)
        self._mailbox.post(lambda: self._start(action, what, pending))
        return pending

    def spawn(self, action: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task of the loop until it returns or the thread is closed."""
        task = self._loop.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Cancel all tasks, run ``drain``, then stop the loop and the thread; idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._shut(drain), self._loop)
            with contextlib.suppress(Exception):
                closing.result(_DRAIN_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_S)
        if not self._loop.is_running():
            self._loop.close()

    def _start(self, action: Coroutine[Any, Any, T], what: str, pending: Pending[T]) -> None:
        task = self._loop.create_task(self._run(action, what, pending))
        self._tasks.add(task)
        pending.start(task)

    async def _run(self, action: Coroutine[Any, Any, T], what: str, pending: Pending[T]) -> None:
        try:
            pending.finish(await action, None)
        except asyncio.CancelledError as err:
            closed = BusUnreachable(f"{what}: the bus was closed during the call")
            pending.finish(None, closed if self._closing else err)
        except BaseException as err:  # noqa: BLE001  the caller raises it
            pending.finish(None, err)
        finally:
            self._tasks.discard(asyncio.current_task())  # type: ignore[arg-type]  # this runs in a task
            del pending  # else the error, its traceback and this frame keep each other in memory

    async def _shut(self, drain: Callable[[], Awaitable[None]]) -> None:
        await _cancel(self._tasks - {asyncio.current_task()})
        await drain()
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})  # the client does not wait for its own tasks


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
