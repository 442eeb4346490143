"""From the event loop to the engine thread and back: a request's sequences are handed over and awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from penstock.rollout_service.embedded_engine.engine_thread import Engine
from penstock.rollout_service.embedded_engine.errors import EngineAtFault
from penstock.rollout_service.embedded_engine.http.adapter_registry import AdapterRegistry
from penstock.rollout_service.embedded_engine.http.build_job import Asked
from penstock.rollout_service.embedded_engine.sequence import Job


class JobRunner:
    """Hands requests to the engine; counts who computes with which adapter."""

    def __init__(self, engine: Engine, adapters: AdapterRegistry) -> None:
        """Hold both."""
        self._engine = engine
        self._adapters = adapters
        self._releases: set[asyncio.Task[None]] = set()

    async def run_to_end(self, request: Request, asked: Asked) -> float:
        """Have the engine finish the sequences; returns the seconds it took. A client that leaves ends them."""
        job, done = self._submit(asked)
        left = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((done, left), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self._engine.cancel(job)
            await done
        finally:
            left.cancel()
        raise_if_engine_failed(asked)
        return time.monotonic() - job.received_at

    async def steps(self, asked: Asked) -> AsyncIterator[list[int]]:
        """Submit the sequences and yield their token counts while they grow; ends when all have finished.

        Steps that pass while the client reads slowly are skipped. A client that leaves ends the sequences.
        """
        steps: asyncio.Queue[list[int] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_step(counts: list[int]) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, counts)

        job, done = self._submit(asked, on_step)
        done.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (counts := await steps.get()) is not None:
                if steps.empty():
                    yield counts
            await done
        finally:
            if not done.done():
                self._engine.cancel(job)
        raise_if_engine_failed(asked)

    async def within(self, asked: Asked, deadline_s: float) -> bool:
        """Have the engine finish the sequences; False, and they are ended, when it takes longer."""
        job, done = self._submit(asked)
        try:
            await asyncio.wait_for(done, deadline_s)
        except TimeoutError:
            self._engine.cancel(job)
            return False
        raise_if_engine_failed(asked)
        return True

    def _submit(
        self, asked: Asked, on_step: Callable[[list[int]], None] | None = None
    ) -> tuple[Job, asyncio.Future[None]]:
        """Return a job that the engine has, and the future that its end resolves in this event loop."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def resolve(error: Exception | None) -> None:
            release = asyncio.ensure_future(releasing())  # only now: an abandoned job may still take a step
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

        job = Job(asked.sequences, on_done, on_step)
        self._engine.submit(job)
        releasing = self._adapters.hold(sequence.adapter for sequence in asked.sequences)
        return job, done


def raise_if_engine_failed(asked: Asked) -> None:
    """Raise EngineAtFault when the engine could not compute one of the sequences."""
    failed = next((item for item in asked.sequences if item.finish and item.finish.status_code), None)
    if failed is not None and failed.finish is not None:
        raise EngineAtFault(failed.finish.message)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
