"""A thread with an event loop, for what goes on while the calling program does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.protocol.errors import PenstockError

T = TypeVar("T")

_DEADLINE_S = 90.0  # of an action
_STOP_S = 5.0


class LoopThread:
    """A daemon thread with an event loop of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until `end`."""
        return self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_S))
        self.loop.close()

    def start(self, action: Coroutine[Any, Any, T]) -> Future[T]:
        """Start an action on the thread's loop."""
        return asyncio.run_coroutine_threadsafe(action, self.loop)

    def run(
        self, action: Coroutine[Any, Any, T], deadline_s: float = _DEADLINE_S, *, must_finish: bool = True
    ) -> T | None:
        """Run on the thread's loop and return the result; raises what it raises, and PenstockError at the deadline."""
        future = asyncio.run_coroutine_threadsafe(action, self.loop)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            if must_finish:
                raise PenstockError(
                    f"the reward's thread did not answer within {deadline_s:.0f} s: a call of the function does not return"
                ) from None
            return None

    def end(self) -> None:
        """Stop the loop; a thread in which a function does not return is left to the end of the process."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_STOP_S)
