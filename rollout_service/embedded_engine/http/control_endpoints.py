"""The endpoints that change the engine: pauses, aborts, weights and adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.rollout_service.embedded_engine.engine_thread import WeightUpdate
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused, RequestRefused, UnsupportedModel
from penstock.rollout_service.embedded_engine.http.adapter_registry import AdapterRegistry
from penstock.rollout_service.embedded_engine.http.bodies import (
    AbortBody,
    ContinueBody,
    LoadAdapterBody,
    PauseBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from penstock.rollout_service.embedded_engine.http.request_errors import read_body
from penstock.rollout_service.embedded_engine.http.responses import json_response
from penstock.rollout_service.embedded_engine.http.server_state import checksum_reply, server_of


async def pause_generation(request: Request) -> Response:
    """Stop computing: ``/pause_generation``."""
    body = await read_body(request, PauseBody)
    num = await asyncio.wrap_future(server_of(request).engine.pause(body.mode))
    return json_response({"message": f"Generation paused successfully; {num} sequences were running.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    """Compute again: ``/continue_generation``."""
    await read_body(request, ContinueBody)
    await asyncio.wrap_future(server_of(request).engine.resume())
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(request: Request) -> Response:
    """End sequences early; their own replies hold the tokens they have: ``/abort_request``."""
    body = await read_body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestRefused("rid is empty, which would match every request; send abort_all=true to mean that")
    await asyncio.wrap_future(server_of(request).engine.abort(prefix=body.rid, everything=body.abort_all))
    return Response(status_code=200)


async def flush_cache(request: Request) -> Response:
    """Drop what is kept of ended sequences: ``/flush_cache``; refused while sequences run or wait."""
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
        update = WeightUpdate(weights, body.weight_version, body.model_path, body.flush_cache, body.abort_all_requests)
        outcome = await asyncio.wrap_future(server.engine.update(update))
        reply = {"success": outcome.success, "message": outcome.message, "num_paused_requests": outcome.num_paused}
        if not outcome.success:
            return json_response(reply, status=400)
        return json_response(reply | {"weight_version": server.engine.version} | checksum_reply(server))


async def load_lora_adapter(request: Request) -> Response:
    """Check an adapter folder completely, then serve it under a name: ``/load_lora_adapter``."""
    body = await read_body(request, LoadAdapterBody)
    return await _change_adapters(
        server_of(request).adapters, lambda registry: registry.load(body.lora_name, body.lora_path)
    )


async def unload_lora_adapter(request: Request) -> Response:
    """Remove an adapter once no request uses it any more: ``/unload_lora_adapter``."""
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
