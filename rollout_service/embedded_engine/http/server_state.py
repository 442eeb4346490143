"""What the endpoints share: the server's parts, bodies, responses, and how sequences reach the engine thread."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import (
    CheckpointRefused,
    EngineAtFault,
    EngineStopped,
    RequestRefused,
)
from penstock.rollout_service.embedded_engine.http.bodies import ImageReader
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob, ServedModel, Text
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.process import EngineSettings
from penstock.rollout_service.embedded_engine.sequence import Job

if TYPE_CHECKING:
    from penstock.rollout_service.embedded_engine.model.low_rank import Adapter
    from penstock.rollout_service.embedded_engine.model.weights import Weights

AnyBody = TypeVar("AnyBody", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
ENGINE_VERSION = "penstock-embedded"


class AdapterRegistry:
    """The adapters of one server; loads and unloads run one at a time, while the engine generates."""

    def __init__(
        self, read: Callable[[str, str], Adapter], drop: Callable[[Adapter], Awaitable[None]], *, max_loaded: int
    ) -> None:
        self._read = read
        self._drop = drop
        self._max_loaded = max_loaded
        self._listed: dict[str, Adapter] = {}
        self._unloading: set[str] = set()
        self._in_use: Counter[int] = Counter()  # by the adapter's number
        self._one_change = asyncio.Lock()
        self._released = asyncio.Condition()

    @property
    def listed(self) -> Mapping[str, Adapter]:
        return MappingProxyType(self._listed)

    async def load(self, name: str, path: str) -> None:
        if name in self._unloading:
            raise CheckpointRefused(
                f"adapter {name} is being unloaded: requests with it are still running; retry once they have ended"
            )
        async with self._one_change:
            if name in self._listed:
                raise CheckpointRefused(
                    f"adapter {name} is already loaded, from {self._listed[name].path}; unload it first"
                )
            if len(self._listed) >= self._max_loaded:
                raise CheckpointRefused(
                    f"{len(self._listed)} adapters are loaded, and --max-loaded-loras is {self._max_loaded}; unload one"
                )
            self._listed[name] = await asyncio.to_thread(self._read, name, path)

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests, wait for running ones, remove it; raises CheckpointRefused."""
        adapter = self._listed.pop(name, None)
        if adapter is None:
            raise CheckpointRefused(f"adapter {name} is not loaded; loaded are: {', '.join(self._listed) or 'none'}")
        self._unloading.add(name)
        try:
            async with self._released:
                await self._released.wait_for(lambda: not self._in_use[adapter.number])
            await self._drop(adapter)
        finally:
            self._unloading.discard(name)

    def hold(self, adapters: Iterable[Adapter | None]) -> Callable[[], Awaitable[None]]:
        numbers = {adapter.number for adapter in adapters if adapter is not None}
        self._in_use.update(numbers)

        async def release() -> None:
            async with self._released:
                self._in_use.subtract(numbers)
                self._released.notify_all()

        return release


class JobRunner:
    def __init__(self, engine: EngineThread, adapters: AdapterRegistry) -> None:
        self._engine = engine
        self._adapters = adapters
        self._releases: set[asyncio.Task[None]] = set()

    async def run_to_end(self, request: Request, requested: RequestedJob) -> None:
        """Run the sequences to their end. A disconnected client or a cancellation ends them."""
        job, done = self._submit(requested)
        disconnected = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((done, disconnected), return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            if not done.done():
                self._engine.cancel(job)
        await done
        raise_if_engine_failed(requested)

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

    def _submit(
        self, requested: RequestedJob, on_step: Callable[[list[int]], None] | None = None
    ) -> tuple[Job, asyncio.Future[None]]:
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
    failed = next((item for item in requested.sequences if item.finish and item.finish.status_code), None)
    if failed is not None and failed.finish is not None:
        raise EngineAtFault(failed.finish.message)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(content: object, *, status: int = 200) -> Response:
    return Response(pydantic_core.to_json(content), status_code=status, media_type="application/json")


def event(content: object) -> bytes:
    return b"data: " + pydantic_core.to_json(content) + b"\n\n"


def route(path: str, handler: Handler, *methods: str) -> Route:
    """Return a route whose handler may raise RequestRefused, EngineAtFault or EngineStopped."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestRefused as error:
            return _error(str(error), 400)
        except EngineAtFault as error:
            return _error(str(error), 500)
        except EngineStopped as error:
            return _error(str(error), 503)

    return Route(path, guarded, methods=list(methods))


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        places = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in details]
        raise RequestRefused("; ".join(places)) from error


def _error(message: str, status: int) -> Response:
    return json_response({"error": {"message": message}}, status=status)


@dataclass(slots=True)
class ServerState:
    engine: EngineThread
    jobs: JobRunner
    adapters: AdapterRegistry
    settings: EngineSettings
    config: ModelConfig
    model: ServedModel
    text: Text
    images: ImageReader
    read_weights: Callable[[Path], Weights]  # reads and checks a folder; blocks, runs in a thread
    one_update: asyncio.Lock = field(default_factory=asyncio.Lock)


def server_of(request: Request) -> ServerState:
    return request.app.state.server


def model_name(server: ServerState) -> str:
    return server.settings.served_model_name or str(server.settings.model_path)


def checksum_reply(server: ServerState) -> dict[str, Any]:
    checksum = server.engine.weights_checksum
    rank = {"checksums": {}, "per_gpu_checksum": checksum, "parallelism_info": {"engine": "embedded"}}
    return {"ranks": [rank], "per_engine_checksum": checksum}
