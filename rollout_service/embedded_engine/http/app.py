"""The HTTP endpoints of the engine, SGLang's, translated into jobs and commands.

Every handler checks the body, passes it to the engine thread and awaits the answer. A client's error is a 400 whose
text names it; an engine's failure is a 500 or 503.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread, WeightUpdate
from penstock.rollout_service.embedded_engine.errors import (
    CheckpointRefused,
    EngineAtFault,
    EngineStopped,
    RequestRefused,
    UnsupportedModel,
)
from penstock.rollout_service.embedded_engine.http.adapter_registry import AdapterRegistry
from penstock.rollout_service.embedded_engine.http.bodies import (
    AbortBody,
    CheckWeightsBody,
    ContinueBody,
    GenerateBody,
    LoadAdapterBody,
    PauseBody,
    SamplingParams,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob, ServedModel, build_job
from penstock.rollout_service.embedded_engine.http.chat_completions import (
    ChatBody,
    build_chat_job,
    chat_chunks,
    chat_reply,
)
from penstock.rollout_service.embedded_engine.http.metrics import CONTENT_TYPE, render_metrics
from penstock.rollout_service.embedded_engine.http.replies import build_chunk, build_replies
from penstock.rollout_service.embedded_engine.http.request_errors import read_body, route
from penstock.rollout_service.embedded_engine.http.responses import event, json_response
from penstock.rollout_service.embedded_engine.http.run_job import JobRunner
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.model.transformer import Weights
from penstock.rollout_service.embedded_engine.settings import EngineSettings

_HEALTH_DEADLINE_S = 20.0  # SGLang's
_VERSION = "penstock-embedded"


@dataclass(slots=True)
class Server:
    """What the handlers share."""

    engine: EngineThread
    jobs: JobRunner
    adapters: AdapterRegistry
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
            route("/generate", generate, "POST", "PUT"),
            route("/v1/chat/completions", chat_completions, "POST"),
            route("/pause_generation", pause_generation, "POST"),
            route("/continue_generation", continue_generation, "POST"),
            route("/abort_request", abort_request, "POST"),
            route("/update_weights_from_disk", update_weights_from_disk, "POST"),
            route("/load_lora_adapter", load_lora_adapter, "POST"),
            route("/unload_lora_adapter", unload_lora_adapter, "POST"),
            route("/v1/models", models, "GET"),
            route("/weights_checker", weights_checker, "POST"),
            route("/flush_cache", flush_cache, "GET", "POST"),
            route("/model_info", model_info, "GET"),
            route("/get_model_info", model_info, "GET"),
            route("/server_info", server_info, "GET"),
            route("/get_server_info", server_info, "GET"),
            route("/health", health, "GET"),
            route("/health_generate", health_generate, "GET"),
            route("/ready", ready, "GET"),
            route("/v1/loads", loads, "GET"),
            route("/metrics", metrics, "GET"),
        ]
    )
    app.state.server = server
    return app


async def generate(request: Request) -> Response:
    """Sample completions: ``/generate``."""
    server = _server(request)
    body = await read_body(request, GenerateBody)
    requested = build_job(body, server.model)
    if body.stream:
        return StreamingResponse(_events(_generate_chunks(server, requested)), media_type="text/event-stream")
    latency_s = await server.jobs.run_to_end(request, requested)
    replies = build_replies(requested, server.text, latency_s)
    return json_response(replies if requested.is_list else replies[0])


async def chat_completions(request: Request) -> Response:
    """Answer a conversation: ``/v1/chat/completions``."""
    server = _server(request)
    body = await read_body(request, ChatBody)
    requested = build_chat_job(body, server.model)
    name = body.model or _model_name(server)
    if body.stream:
        chunks = chat_chunks(requested, server.jobs.steps(requested), server.text, name)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")
    await server.jobs.run_to_end(request, requested)
    return json_response(chat_reply(requested, server.text, name))


async def pause_generation(request: Request) -> Response:
    """Stop computing: ``/pause_generation``."""
    body = await read_body(request, PauseBody)
    num = await asyncio.wrap_future(_server(request).engine.pause(body.mode))
    return json_response({"message": f"Generation paused successfully; {num} sequences were running.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    """Compute again: ``/continue_generation``."""
    await read_body(request, ContinueBody)
    await asyncio.wrap_future(_server(request).engine.resume())
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(request: Request) -> Response:
    """End sequences early; their own replies hold the tokens they have: ``/abort_request``."""
    body = await read_body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestRefused("rid is empty, which would match every request; send abort_all=true to mean that")
    await asyncio.wrap_future(_server(request).engine.abort(prefix=body.rid, everything=body.abort_all))
    return Response(status_code=200)


async def update_weights_from_disk(request: Request) -> Response:
    """Check a model folder completely, then serve it: ``/update_weights_from_disk``.

    The answer has more fields than SGLang's: the version that is served now, and its checksum as ``/weights_checker``
    returns it, known from the check, so that a client need not ask for them.
    """
    server = _server(request)
    body = await read_body(request, UpdateWeightsBody)
    async with server.one_update:
        try:
            weights = await asyncio.to_thread(server.read_weights, Path(body.model_path))
        except (CheckpointRefused, UnsupportedModel) as error:
            return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        update = WeightUpdate(weights, body.weight_version, body.model_path, body.flush_cache, body.abort_all_requests)
        outcome = await asyncio.wrap_future(server.engine.update(update))
        reply = {"success": outcome.success, "message": outcome.message, "num_paused_requests": outcome.num_paused}
        if not outcome.success:
            return json_response(reply, status=400)
        return json_response(reply | {"weight_version": server.engine.version} | _checksum(server))


async def load_lora_adapter(request: Request) -> Response:
    """Check an adapter folder completely, then serve it under a name: ``/load_lora_adapter``."""
    body = await read_body(request, LoadAdapterBody)
    return await _change_adapters(
        _server(request).adapters, lambda registry: registry.load(body.lora_name, body.lora_path)
    )


async def unload_lora_adapter(request: Request) -> Response:
    """Remove an adapter once no request uses it any more: ``/unload_lora_adapter``."""
    body = await read_body(request, UnloadAdapterBody)
    return await _change_adapters(_server(request).adapters, lambda registry: registry.unload(body.lora_name))


async def _change_adapters(adapters: AdapterRegistry, change: Callable[[AdapterRegistry], Awaitable[None]]) -> Response:
    message = None
    try:
        await change(adapters)
    except CheckpointRefused as error:
        message = str(error)
    loaded = {name: adapter.path for name, adapter in adapters.listed.items()}
    reply = {"success": message is None, "error_message": message, "loaded_adapters": loaded}
    return json_response(reply, status=200 if message is None else 400)


async def models(request: Request) -> Response:
    """List the model and the adapters that requests may name: ``/v1/models``."""
    server = _server(request)
    name = _model_name(server)
    cards = [{"id": name, "object": "model", "root": name, "parent": None, "max_model_len": server.model.max_tokens}]
    cards += [
        {"id": adapter.name, "object": "model", "root": adapter.path, "parent": name, "max_model_len": None}
        for adapter in server.adapters.listed.values()
    ]
    return json_response({"object": "list", "data": cards})


async def weights_checker(request: Request) -> Response:
    """Return the checksum of the served weights: ``/weights_checker``."""
    await read_body(request, CheckWeightsBody)
    return json_response({"success": True, "message": "", **_checksum(_server(request))})


async def flush_cache(request: Request) -> Response:
    """Confirm that the KV cache is empty: ``/flush_cache``."""
    if await asyncio.wrap_future(_server(request).engine.flush()):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Flush cache failed: requests are running or waiting.\n", status_code=400)


async def model_info(request: Request) -> Response:
    """Describe the served weights: ``/model_info``."""
    server = _server(request)
    return json_response(
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
    return json_response(
        {
            **server.settings.model_dump(mode="json"),
            "enable_lora": True,
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
    """Answer 200 while the engine thread runs, paused or not: ``/health``."""
    return Response(status_code=200 if _server(request).engine.is_alive else 503)


async def health_generate(request: Request) -> Response:
    """Generate one token and answer 200, or 503 when paused or too slow: ``/health_generate``."""
    server = _server(request)
    if server.engine.paused:
        return PlainTextResponse("paused\n", status_code=503)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    requested = build_job(GenerateBody(input_ids=[0], sampling_params=params), server.model)
    if not await server.jobs.within(requested, _HEALTH_DEADLINE_S):
        return PlainTextResponse(f"no token within {_HEALTH_DEADLINE_S:.0f} s\n", status_code=503)
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """Answer 200 while requests are computed, 503 while paused: ``/ready``."""
    engine = _server(request).engine
    return Response(status_code=200 if engine.is_alive and not engine.paused else 503)


async def loads(request: Request) -> Response:
    """Report running and waiting requests and used tokens: ``/v1/loads``."""
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
    return json_response({"timestamp": datetime.now(UTC).isoformat(), "version": _VERSION, "loads": [load]})


async def metrics(request: Request) -> Response:
    """Report all metrics for Prometheus: ``/metrics``."""
    return PlainTextResponse(render_metrics(_server(request).engine), media_type=CONTENT_TYPE)


async def _generate_chunks(server: Server, requested: RequestedJob) -> AsyncIterator[dict[str, Any]]:
    """Yield cumulative chunks while sampling, then the full reply of each sequence."""
    started = time.monotonic()
    sent = [0] * len(requested.sequences)
    async for counts in server.jobs.steps(requested):
        for index, count in enumerate(counts):
            if count > sent[index]:
                sent[index] = count
                yield build_chunk(requested, index, count, server.engine.version, server.text) | {"index": index}
    for index, reply in enumerate(build_replies(requested, server.text, time.monotonic() - started)):
        yield reply | {"index": index}


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield server-sent events; an error is an event too, because the status has been sent already."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except (EngineStopped, EngineAtFault) as error:
        yield event({"error": {"message": str(error), "type": type(error).__name__, "code": 500, "retryable": True}})
    yield b"data: [DONE]\n\n"


def _checksum(server: Server) -> dict[str, Any]:
    checksum = server.engine.weights_checksum
    rank = {"checksums": {}, "per_gpu_checksum": checksum, "parallelism_info": {"engine": "embedded"}}
    return {"ranks": [rank], "per_engine_checksum": checksum}


def _model_name(server: Server) -> str:
    return server.settings.served_model_name or str(server.settings.model_path)


def _server(request: Request) -> Server:
    return request.app.state.server
