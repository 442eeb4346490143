"""Pass a request's sequences from the event loop to the engine thread, and await their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import EngineAtFault
from penstock.rollout_service.embedded_engine.http.adapter_registry import AdapterRegistry
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob
from penstock.rollout_service.embedded_engine.sequence import Job


class JobRunner:
    """Runs requests on the engine thread, and counts the requests of each adapter."""

    def __init__(self, engine: EngineThread, adapters: AdapterRegistry) -> None:
        """Prepare; nothing runs before a request."""
        self._engine = engine
        self._adapters = adapters
        self._releases: set[asyncio.Task[None]] = set()

    async def run_to_end(self, request: Request, requested: RequestedJob) -> float:
        """Run the sequences to their end; return the seconds it took. A disconnected client ends them."""
        job, done = self._submit(requested)
        disconnected = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((done, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self._engine.cancel(job)
            await done
        finally:
            disconnected.cancel()
        raise_if_engine_failed(requested)
        return time.monotonic() - job.received_at

    async def steps(self, requested: RequestedJob) -> AsyncIterator[list[int]]:
        """Submit the sequences and yield their token counts after each step, until all have finished.

        Steps are skipped while the client reads slowly. A disconnected client ends the sequences.
        """
        steps: asyncio.Queue[list[int] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_step(counts: list[int]) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, counts)

        job, done = self._submit(requested, on_step)
        done.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (counts := await steps.get()) is not None:
                if steps.empty():
                    yield counts
            await done
        finally:
            if not done.done():
                self._engine.cancel(job)
        raise_if_engine_failed(requested)

    async def within(self, requested: RequestedJob, deadline_s: float) -> bool:
        """Run the sequences to their end; return False, having ended them, when that takes longer than the deadline."""
        job, done = self._submit(requested)
        try:
            await asyncio.wait_for(done, deadline_s)
        except TimeoutError:
            self._engine.cancel(job)
            return False
        raise_if_engine_failed(requested)
        return True

    def _submit(
        self, requested: RequestedJob, on_step: Callable[[list[int]], None] | None = None
    ) -> tuple[Job, asyncio.Future[None]]:
        """Submit the sequences; return their job, and a future of this event loop that its end resolves."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def resolve(error: Exception | None) -> None:
            release = asyncio.ensure_future(releasing())  # only now: a cancelled job may still run for a step
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def on_done(error: Exception | None) -> None:
            loop.call_soon_threadsafe(resolve, error)

        job = Job(requested.sequences, on_done, on_step)
        self._engine.submit(job)
        releasing = self._adapters.hold(sequence.adapter for sequence in requested.sequences)
        return job, done


def raise_if_engine_failed(requested: RequestedJob) -> None:
    """Raise EngineAtFault when the engine could not compute one of the sequences."""
    failed = next((item for item in requested.sequences if item.finish and item.finish.status_code), None)
    if failed is not None and failed.finish is not None:
        raise EngineAtFault(failed.finish.message)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
