"""Calls from threads and event loops to a thread with a loop of its own: each gets its result, error or cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.protocol.errors import BusUnreachable
from penstock.protocol.transport.loop_thread import CallThread, LoopThread


async def _nothing() -> None:
    pass


class Endless:
    """An action that does not end by itself."""

    def __init__(self) -> None:
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def run(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()


@pytest.fixture
def thread() -> Iterator[CallThread]:
    started = CallThread("test-pending")
    yield started
    started.close(_nothing)


async def _add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def _fail() -> None:
    raise ValueError("no")


def test_each_of_many_callers_gets_its_own_result(thread: CallThread) -> None:
    """No wake-up is lost while threads and loops call at once."""

    async def many(first: int) -> list[int]:
        return await asyncio.gather(*(_awaited(thread, first + n) for n in range(50)))

    with ThreadPoolExecutor(6) as pool:
        loops = [pool.submit(asyncio.run, many(1000 * k)) for k in range(3)]
        waits = [
            pool.submit(lambda k=k: [thread.call(_add(k, n), "add", 30.0).wait() for n in range(50)]) for k in range(3)
        ]
        assert [loop.result(60) for loop in loops] == [[1000 * k + n + 1 for n in range(50)] for k in range(3)]
        assert [wait.result(60) for wait in waits] == [[k + n for n in range(50)] for k in range(3)]


async def _awaited(thread: CallThread, number: int) -> int:
    pending = thread.call(_add(number, 1), "add", 30.0)
    found = await pending
    assert pending.done()
    assert await pending == pending.wait() == found  # a result stays
    return found


def test_an_error_is_raised_where_the_result_is_awaited(thread: CallThread) -> None:
    with pytest.raises(ValueError, match="no"):
        thread.call(_fail(), "fail", 30.0).wait()

    async def run() -> None:
        await thread.call(_fail(), "fail", 30.0)

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())


def test_a_cancelled_caller_cancels_the_call(thread: CallThread) -> None:
    """What nobody waits for any more does not go on, as a fetch that would hold messages."""
    endless = Endless()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.call(endless.run(), "sleep", 30.0)

    asyncio.run(run())
    assert endless.cancelled.wait(60.0) or not endless.started.is_set()


def test_a_closed_thread_refuses_calls_and_ends_those_that_run(thread: CallThread) -> None:
    endless = Endless()
    running = thread.call(endless.run(), "a long call", 30.0)
    assert endless.started.wait(60.0)
    thread.close(_nothing)
    with pytest.raises(BusUnreachable, match="a long call: the bus was closed during the call"):
        running.wait()
    with pytest.raises(BusUnreachable, match="a late call: the bus is closed"):
        thread.call(_nothing(), "a late call", 30.0)


def test_a_stopped_thread_has_cancelled_what_ran() -> None:
    """A result arrives in the calling thread; the end cancels an endless action, and may be asked for twice."""
    thread, endless = LoopThread("test"), Endless()
    assert thread.start(_add(1, 2)).result(30) == 3
    thread.start(endless.run())
    assert endless.started.wait(60.0)
    assert thread.is_running
    thread.stop()
    thread.stop()
    assert endless.cancelled.is_set()
    assert not thread.is_running
    late = _add(1, 2)
    with pytest.raises(RuntimeError, match="closed"):
        thread.start(late)
    late.close()
