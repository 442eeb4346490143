"""The HTTP face of the engine: SGLang's endpoints, translated into jobs and commands.

Every handler follows the same line: check the body, hand over to the engine thread, await its answer. What a
client did wrong is a 400 whose text says what; an engine at fault is a 500 or 503.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout_service.embedded_engine.bodies import (
    AbortBody,
    CheckWeightsBody,
    ContinueBody,
    GenerateBody,
    PauseBody,
    SamplingParams,
    UpdateWeightsBody,
)
from rollout_service.embedded_engine.build_job import Asked, ServedModel, build_job
from rollout_service.embedded_engine.chat import ChatBody, build_chat_job, chat_chunks, chat_reply
from rollout_service.embedded_engine.engine import Engine, Update
from rollout_service.embedded_engine.errors import (
    CheckpointRefused,
    EngineStopped,
    RequestRefused,
    UnsupportedModel,
)
from rollout_service.embedded_engine.metrics import CONTENT_TYPE, render_metrics
from rollout_service.embedded_engine.model_config import ModelConfig
from rollout_service.embedded_engine.replies import build_chunk, build_replies
from rollout_service.embedded_engine.sequence import Job
from rollout_service.embedded_engine.settings import EngineSettings
from rollout_service.embedded_engine.text import Text
from rollout_service.embedded_engine.transformer import Weights

_HEALTH_DEADLINE_S = 20.0  # SGLang's
_VERSION = "penstock-embedded"

AnyBody = TypeVar("AnyBody", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Server:
    """What the handlers share."""

    engine: Engine
    settings: EngineSettings
    config: ModelConfig
    model: ServedModel
    text: Text
    read_weights: Callable[[Path], Weights]  # reads and checks a folder; blocks, runs in a thread
    one_update: asyncio.Lock = field(default_factory=asyncio.Lock)
    started_at: float = field(default_factory=time.monotonic)


def build_app(server: Server) -> Starlette:
    """Return the ASGI application."""
    app = Starlette(
        routes=[
            _route("/generate", generate, "POST", "PUT"),
            _route("/v1/chat/completions", chat_completions, "POST"),
            _route("/pause_generation", pause_generation, "POST"),
            _route("/continue_generation", continue_generation, "POST"),
            _route("/abort_request", abort_request, "POST"),
            _route("/update_weights_from_disk", update_weights_from_disk, "POST"),
            _route("/weights_checker", weights_checker, "POST"),
            _route("/flush_cache", flush_cache, "GET", "POST"),
            _route("/model_info", model_info, "GET"),
            _route("/get_model_info", model_info, "GET"),
            _route("/server_info", server_info, "GET"),
            _route("/get_server_info", server_info, "GET"),
            _route("/health", health, "GET"),
            _route("/health_generate", health_generate, "GET"),
            _route("/ready", ready, "GET"),
            _route("/v1/loads", loads, "GET"),
            _route("/metrics", metrics, "GET"),
        ]
    )
    app.state.server = server
    return app


async def generate(request: Request) -> Response:
    """Sample completions: ``/generate``."""
    server = _server(request)
    body = await _body(request, GenerateBody)
    asked = build_job(body, server.model)
    if body.stream:
        return StreamingResponse(_events(_generate_chunks(server, asked)), media_type="text/event-stream")
    latency_s = await _run_to_end(request, asked)
    replies = build_replies(asked, server.text, latency_s)
    return _json(replies if asked.is_list else replies[0])


async def chat_completions(request: Request) -> Response:
    """Answer a conversation: ``/v1/chat/completions``."""
    server = _server(request)
    body = await _body(request, ChatBody)
    asked = build_chat_job(body, server.model)
    name = body.model or _model_name(server)
    if body.stream:
        chunks = chat_chunks(asked, _steps(server, asked), server.text, name)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")
    await _run_to_end(request, asked)
    return _json(chat_reply(asked, server.text, name))


async def _run_to_end(request: Request, asked: Asked) -> float:
    """Have the engine finish the sequences; returns the seconds it took. A client that leaves ends them."""
    server = _server(request)
    job, done = _job(asked)
    server.engine.submit(job)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((done, left), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            server.engine.cancel(job)
        await done
    finally:
        left.cancel()
    _raise_if_engine_failed(asked)
    return time.monotonic() - job.received_at


async def pause_generation(request: Request) -> Response:
    """Stop computing: ``/pause_generation``."""
    body = await _body(request, PauseBody)
    num = await asyncio.wrap_future(_server(request).engine.pause(body.mode))
    return _json({"message": f"Generation paused successfully; {num} sequences were running.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    """Compute again: ``/continue_generation``."""
    await _body(request, ContinueBody)
    await asyncio.wrap_future(_server(request).engine.resume())
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(request: Request) -> Response:
    """End sequences early; their own replies carry what they have: ``/abort_request``."""
    body = await _body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestRefused("rid is empty, which would match every request; send abort_all=true to mean that")
    await asyncio.wrap_future(_server(request).engine.abort(prefix=body.rid, everything=body.abort_all))
    return Response(status_code=200)


async def update_weights_from_disk(request: Request) -> Response:
    """Check a model folder completely, then serve it: ``/update_weights_from_disk``."""
    server = _server(request)
    body = await _body(request, UpdateWeightsBody)
    async with server.one_update:
        try:
            weights = await asyncio.to_thread(server.read_weights, Path(body.model_path))
        except (CheckpointRefused, UnsupportedModel) as error:
            return _json({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        update = Update(weights, body.weight_version, body.model_path, body.flush_cache, body.abort_all_requests)
        outcome = await asyncio.wrap_future(server.engine.update(update))
    reply = {"success": outcome.success, "message": outcome.message, "num_paused_requests": outcome.num_paused}
    return _json(reply, status=200 if outcome.success else 400)


async def weights_checker(request: Request) -> Response:
    """Say the checksum of the served weights: ``/weights_checker``."""
    await _body(request, CheckWeightsBody)
    checksum = _server(request).engine.weights_checksum
    rank = {"checksums": {}, "per_gpu_checksum": checksum, "parallelism_info": {"engine": "embedded"}}
    return _json({"success": True, "message": "", "ranks": [rank], "per_engine_checksum": checksum})


async def flush_cache(request: Request) -> Response:
    """Confirm that no keys and values are held: ``/flush_cache``."""
    if await asyncio.wrap_future(_server(request).engine.flush()):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Flush cache failed: requests are running or waiting.\n", status_code=400)


async def model_info(request: Request) -> Response:
    """Describe the served weights: ``/model_info``."""
    server = _server(request)
    return _json(
        {
            "model_path": server.engine.model_path,
            "served_model_name": _model_name(server),
            "tokenizer_path": str(server.settings.model_path),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": server.engine.version,
            "load_format": "auto",
            "model_type": server.config.architecture.removesuffix("ForCausalLM").lower(),
            "architectures": [server.config.architecture],
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def server_info(request: Request) -> Response:
    """Describe the process: ``/server_info``."""
    server = _server(request)
    limits = server.engine.limits
    return _json(
        {
            **server.settings.model_dump(mode="json"),
            "version": _VERSION,
            "frontend": "python",
            "uptime_s": time.monotonic() - server.started_at,
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running,
            "context_length": server.model.max_tokens,
            "weight_version": server.engine.version,
            "is_paused": server.engine.paused,
        }
    )


async def health(request: Request) -> Response:
    """Answer 200 while the engine thread lives, paused or not: ``/health``."""
    return Response(status_code=200 if _server(request).engine.is_alive else 503)


async def health_generate(request: Request) -> Response:
    """Generate one token and answer 200, or 503 when paused or too slow: ``/health_generate``."""
    server = _server(request)
    if server.engine.paused:
        return PlainTextResponse("paused\n", status_code=503)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    asked = build_job(GenerateBody(input_ids=[0], sampling_params=params), server.model)
    job, done = _job(asked)
    server.engine.submit(job)
    try:
        await asyncio.wait_for(done, _HEALTH_DEADLINE_S)
    except TimeoutError:
        server.engine.cancel(job)
        return PlainTextResponse(f"no token within {_HEALTH_DEADLINE_S:.0f} s\n", status_code=503)
    _raise_if_engine_failed(asked)
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """Answer 200 while requests are computed, 503 while paused: ``/ready``."""
    engine = _server(request).engine
    return Response(status_code=200 if engine.is_alive and not engine.paused else 503)


async def loads(request: Request) -> Response:
    """Report how much there is to do: ``/v1/loads``."""
    engine = _server(request).engine
    running, waiting, used = engine.num_running, engine.num_waiting, engine.num_stored_tokens
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": engine.limits.max_total_tokens,
        "max_running_requests": engine.limits.max_running,
        "token_usage": used / engine.limits.max_total_tokens,
    }
    return _json({"timestamp": datetime.now(UTC).isoformat(), "version": _VERSION, "loads": [load]})


async def metrics(request: Request) -> Response:
    """Report every figure for Prometheus: ``/metrics``."""
    return PlainTextResponse(render_metrics(_server(request).engine), media_type=CONTENT_TYPE)


async def _generate_chunks(server: Server, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    """Yield cumulative chunks while sampling, then the full reply of each sequence."""
    started = time.monotonic()
    sent = [0] * len(asked.sequences)
    async for counts in _steps(server, asked):
        for index, count in enumerate(counts):
            if count > sent[index]:
                sent[index] = count
                yield build_chunk(asked, index, count, server.engine.version, server.text) | {"index": index}
    for index, reply in enumerate(build_replies(asked, server.text, time.monotonic() - started)):
        yield reply | {"index": index}


async def _steps(server: Server, asked: Asked) -> AsyncIterator[list[int]]:
    """Submit the sequences and yield their token counts while they grow; ends when all have finished.

    Steps that pass while the client reads slowly are skipped. A client that leaves ends the sequences.
    """
    steps: asyncio.Queue[list[int] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_step(counts: list[int]) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, counts)

    job, done = _job(asked, on_step)
    done.add_done_callback(lambda _: steps.put_nowait(None))
    server.engine.submit(job)
    try:
        while (counts := await steps.get()) is not None:
            if steps.empty():
                yield counts
        await done
    finally:
        if not done.done():
            server.engine.cancel(job)
    _raise_if_engine_failed(asked)


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield server-sent events; errors arrive as an event, because the status has been sent already."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except (EngineStopped, EngineAtFault) as error:
        yield _event({"error": {"message": str(error), "type": type(error).__name__, "code": 500, "retryable": True}})
    yield b"data: [DONE]\n\n"


def _job(asked: Asked, on_step: Callable[[list[int]], None] | None = None) -> tuple[Job, asyncio.Future[None]]:
    """Return a job for the engine and the future that its end resolves in this event loop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def resolve(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def on_done(error: Exception | None) -> None:
        loop.call_soon_threadsafe(resolve, error)

    return Job(asked.sequences, on_done, on_step), done


def _raise_if_engine_failed(asked: Asked) -> None:
    failed = next((item for item in asked.sequences if item.finish and item.finish.status_code), None)
    if failed is not None and failed.finish is not None:
        raise EngineAtFault(failed.finish.message)


class EngineAtFault(Exception):
    """The engine could not compute a request that was in order; answered with HTTP 500."""


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, kind: type[AnyBody]) -> AnyBody:
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        places = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in details]
        raise RequestRefused("; ".join(places)) from error


def _route(path: str, handler: Handler, *methods: str) -> Route:
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


def _model_name(server: Server) -> str:
    return server.settings.served_model_name or str(server.settings.model_path)


def _server(request: Request) -> Server:
    return request.app.state.server


def _error(message: str, status: int) -> Response:
    return _json({"error": {"message": message}}, status=status)


def _event(content: object) -> bytes:
    return b"data: " + pydantic_core.to_json(content) + b"\n\n"


def _json(content: object, *, status: int = 200) -> Response:
    return Response(pydantic_core.to_json(content), status_code=status, media_type="application/json")
