"""An event loop in a thread: results, and an end that cancels what runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.protocol.transport.loop_thread import LoopThread


async def _add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def test_a_stopped_thread_has_cancelled_what_ran() -> None:
    """A result arrives in the calling thread; the end cancels an endless action, and may be asked for twice."""
    thread, started, cancelled = LoopThread("test"), threading.Event(), threading.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    assert thread.start(_add(1, 2)).result(30) == 3
    thread.start(endless())
    assert started.wait(60.0)
    assert thread.is_running
    thread.stop()
    thread.stop()
    assert cancelled.is_set()
    assert not thread.is_running
    late = _add(1, 2)
    with pytest.raises(RuntimeError, match="closed"):
        thread.start(late)
    late.close()
