"""An event loop in a thread of its own, for what goes on while the calling program does something else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_STOP_S = 5.0


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
