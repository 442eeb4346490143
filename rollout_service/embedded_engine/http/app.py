"""The HTTP application: its routes, the endpoints that change the engine, and those that report.

Every handler checks the body, passes it to the engine thread and awaits the answer. A client's error is a 400 whose
text names it; an engine's failure is a 500 or 503.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.protocol.transport import tls
from penstock.rollout_service.embedded_engine.engine_thread import EngineThread, WeightUpdate
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused, RequestRefused, UnsupportedModel
from penstock.rollout_service.embedded_engine.http import generate_endpoints
from penstock.rollout_service.embedded_engine.http.bodies import (
    AbortBody,
    Body,
    CheckWeightsBody,
    GenerateBody,
    LoadAdapterBody,
    OccupationBody,
    PauseBody,
    SamplingParams,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from penstock.rollout_service.embedded_engine.http.build_job import build_job
from penstock.rollout_service.embedded_engine.http.server_state import (
    ENGINE_VERSION,
    AdapterRegistry,
    ServerState,
    checksum_reply,
    json_response,
    model_name,
    read_body,
    route,
    server_of,
)
from penstock.serving.request_checks import Guard, Rules

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_BODY_BYTES = 512 * 1024**2  # a batch of prompts with images
_WITHOUT_KEY = frozenset(
    {"/health", "/health_generate", "/ready", "/metrics", "/v1/loads", "/v1/models"}
)  # they change nothing
_RELEASABLE = ("weights", "kv_cache")
_HEALTH_DEADLINE_S = 20.0  # SGLang's


def render_metrics(engine: EngineThread) -> str:
    counters, running = engine.metrics, engine.num_running
    rows: list[tuple[str, str, str, float]] = [
        ("sglang:num_running_reqs", "gauge", "sequences with keys and values in the cache", running),
        ("sglang:num_queue_reqs", "gauge", "sequences that wait", engine.num_waiting),
        ("sglang:num_paused_reqs", "gauge", "sequences paused in place", running if engine.paused else 0),
        ("sglang:num_used_tokens", "gauge", "tokens in the KV cache", engine.num_stored_tokens),
        ("sglang:prompt_tokens_total", "counter", "prompt tokens of started sequences", counters.prompt_tokens),
        (
            "sglang:cached_tokens_total",
            "counter",
            "prompt tokens that another sequence had computed",
            counters.cached_tokens,
        ),
        ("sglang:generation_tokens_total", "counter", "sampled tokens", counters.generated_tokens),
        ("sglang:num_requests_total", "counter", "sequences answered", counters.finished_sequences),
        ("sglang:num_aborted_requests_total", "counter", "sequences ended early", counters.aborted_sequences),
        ("sglang:num_retracted_requests_total", "counter", "sequences computed again", counters.retractions),
        ("penstock_engine_weight_updates_total", "counter", "weight updates applied", counters.weight_updates),
        ("penstock_engine_kept_tokens", "gauge", "tokens kept for sequences that begin alike", engine.num_kept_tokens),
        ("penstock_engine_evicted_tokens_total", "counter", "kept tokens that made room", engine.num_evicted_tokens),
        ("penstock_engine_busy_seconds_total", "counter", "seconds the engine thread computed", counters.busy_s),
    ]
    lines = []
    for name, kind, meaning, value in rows:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"


async def models(request: Request) -> Response:
    server = server_of(request)
    name = model_name(server)
    cards = [{"id": name, "object": "model", "root": name, "parent": None, "max_model_len": server.model.max_tokens}]
    cards += [
        {"id": adapter.name, "object": "model", "root": adapter.path, "parent": name, "max_model_len": None}
        for adapter in server.adapters.listed.values()
    ]
    return json_response({"object": "list", "data": cards})


async def model_info(request: Request) -> Response:
    server = server_of(request)
    return json_response(
        {
            "model_path": server.engine.model_path,
            "served_model_name": model_name(server),
            "tokenizer_path": str(server.settings.model_path),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": server.engine.version,
            "load_format": "auto",
            "model_type": server.config.architecture.removesuffix("ForCausalLM")
            .removesuffix("ForConditionalGeneration")
            .lower(),
            "architectures": [server.config.architecture],
            "has_image_understanding": server.images.processor is not None,
            "has_audio_understanding": False,
        }
    )


async def server_info(request: Request) -> Response:
    server = server_of(request)
    limits = server.engine.limits
    return json_response(
        {
            **server.settings.model_dump(mode="json"),
            "enable_lora": True,
            "version": ENGINE_VERSION,
            "frontend": "python",
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running,
            "context_length": server.model.max_tokens,
            "weight_version": server.engine.version,
            "is_paused": server.engine.paused,
        }
    )


async def weights_checker(request: Request) -> Response:
    await read_body(request, CheckWeightsBody)
    return json_response({"success": True, "message": "", **checksum_reply(server_of(request))})


async def health(request: Request) -> Response:
    return Response(status_code=200 if server_of(request).engine.is_alive else 503)


async def health_generate(request: Request) -> Response:
    """Generate one token and answer 200, or 503 when paused or too slow: ``/health_generate``."""
    server = server_of(request)
    if server.engine.paused:
        return PlainTextResponse("paused\n", status_code=503)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    requested = build_job(GenerateBody(input_ids=[0], sampling_params=params), server.model)
    try:
        async with asyncio.timeout(_HEALTH_DEADLINE_S):
            await server.jobs.run_to_end(request, requested)
    except TimeoutError:
        return PlainTextResponse(f"no token within {_HEALTH_DEADLINE_S:.0f} s\n", status_code=503)
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    engine = server_of(request).engine
    return Response(status_code=200 if engine.is_alive and not engine.paused else 503)


async def loads(request: Request) -> Response:
    engine = server_of(request).engine
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
    return json_response({"timestamp": datetime.now(UTC).isoformat(), "version": ENGINE_VERSION, "loads": [load]})


async def metrics(request: Request) -> Response:
    return PlainTextResponse(render_metrics(server_of(request).engine), media_type=CONTENT_TYPE)


async def pause_generation(request: Request) -> Response:
    body = await read_body(request, PauseBody)
    num = await asyncio.wrap_future(server_of(request).engine.pause(body.mode))
    return json_response({"message": f"Generation paused successfully; {num} sequences were running.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    await read_body(request, Body)
    await asyncio.wrap_future(server_of(request).engine.resume())
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def release_memory_occupation(request: Request) -> Response:
    body = await read_body(request, OccupationBody)
    if not await asyncio.wrap_future(server_of(request).engine.release(body.tags or _RELEASABLE)):
        raise RequestRefused("sequences run or wait: end them, or wait for them, and release then")
    return Response(status_code=200)


async def resume_memory_occupation(request: Request) -> Response:
    body = await read_body(request, OccupationBody)
    await asyncio.wrap_future(server_of(request).engine.reoccupy(body.tags or _RELEASABLE))
    return Response(status_code=200)


async def abort_request(request: Request) -> Response:
    body = await read_body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestRefused("rid is empty, which would match every request; send abort_all=true to mean that")
    await asyncio.wrap_future(server_of(request).engine.abort(prefix=body.rid, everything=body.abort_all))
    return Response(status_code=200)


async def flush_cache(request: Request) -> Response:
    if await asyncio.wrap_future(server_of(request).engine.flush()):
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse("Flush cache failed: requests are running or waiting.\n", status_code=400)


async def update_weights_from_disk(request: Request) -> Response:
    """Check a model folder completely, then serve it: ``/update_weights_from_disk``.

    The answer has more fields than SGLang's: the version that is served now, and its checksum as ``/weights_checker``
    returns it, known from the check, so that a client need not ask for them.
    """
    server = server_of(request)
    body = await read_body(request, UpdateWeightsBody)
    async with server.one_update:
        try:
            weights = await asyncio.to_thread(server.read_weights, Path(body.model_path))
        except (CheckpointRefused, UnsupportedModel) as error:
            return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        update = WeightUpdate(weights, body.weight_version, body.model_path, body.flush_cache)
        outcome = await asyncio.wrap_future(server.engine.update(update))
        reply = {"success": outcome.success, "message": outcome.message, "num_paused_requests": outcome.num_paused}
        if not outcome.success:
            return json_response(reply, status=400)
        return json_response(reply | {"weight_version": server.engine.version} | checksum_reply(server))


async def load_lora_adapter(request: Request) -> Response:
    body = await read_body(request, LoadAdapterBody)
    return await _change_adapters(
        server_of(request).adapters, lambda registry: registry.load(body.lora_name, body.lora_path)
    )


async def unload_lora_adapter(request: Request) -> Response:
    body = await read_body(request, UnloadAdapterBody)
    return await _change_adapters(server_of(request).adapters, lambda registry: registry.unload(body.lora_name))


async def _change_adapters(adapters: AdapterRegistry, change: Callable[[AdapterRegistry], Awaitable[None]]) -> Response:
    message = None
    try:
        await change(adapters)
    except CheckpointRefused as error:
        message = str(error)
    loaded = {name: adapter.path for name, adapter in adapters.listed.items()}
    reply = {"success": message is None, "error_message": message, "loaded_adapters": loaded}
    return json_response(reply, status=200 if message is None else 400)


def _refusal(status: int, message: str, scope: object = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


def build_app(server: ServerState, key: str = "") -> Starlette:
    """Return the app; with a ``key``, requests other than those of `_WITHOUT_KEY` must have it as bearer token."""
    app = Starlette(
        routes=[
            route("/generate", generate_endpoints.generate, "POST", "PUT"),
            route("/v1/chat/completions", generate_endpoints.chat_completions, "POST"),
            route("/pause_generation", pause_generation, "POST"),
            route("/continue_generation", continue_generation, "POST"),
            route("/release_memory_occupation", release_memory_occupation, "POST"),
            route("/resume_memory_occupation", resume_memory_occupation, "POST"),
            route("/abort_request", abort_request, "POST"),
            route("/update_weights_from_disk", update_weights_from_disk, "POST"),
            route("/load_lora_adapter", load_lora_adapter, "POST"),
            route("/unload_lora_adapter", unload_lora_adapter, "POST"),
            route("/v1/models", models, "GET"),
            route("/weights_checker", weights_checker, "POST"),
            route("/flush_cache", flush_cache, "GET", "POST"),
            route("/model_info", model_info, "GET"),
            route("/server_info", server_info, "GET"),
            route("/health", health, "GET"),
            route("/health_generate", health_generate, "GET"),
            route("/ready", ready, "GET"),
            route("/v1/loads", loads, "GET"),
            route("/metrics", metrics, "GET"),
        ]
    )
    app.state.server = server
    expected = f"Bearer {key}".encode()

    def admit(request: HTTPConnection) -> JSONResponse | None:
        """Refuse what has no key: a local program could otherwise change the weights, or stop the run."""
        sent = request.headers.get("authorization", "").encode()
        if not key or request.scope["path"] in _WITHOUT_KEY or hmac.compare_digest(sent, expected):
            return None
        return _refusal(401, "expected the key that the engine was started with")

    hosts = () if tls.is_loopback(server.settings.host) else None
    fix = "the Host header must be localhost or 127.0.0.1"
    app.add_middleware(Guard, rules=Rules(hosts, admit=admit, answer=_refusal, fix=fix), max_bytes=_MAX_BODY_BYTES)
    return app
