"""The endpoints that report: what is served, health, load and metrics."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.rollout_service.embedded_engine.http.bodies import CheckWeightsBody, GenerateBody, SamplingParams
from penstock.rollout_service.embedded_engine.http.build_job import build_job
from penstock.rollout_service.embedded_engine.http.metrics import CONTENT_TYPE, render_metrics
from penstock.rollout_service.embedded_engine.http.request_errors import read_body
from penstock.rollout_service.embedded_engine.http.responses import json_response
from penstock.rollout_service.embedded_engine.http.server_state import (
    ENGINE_VERSION,
    checksum_reply,
    model_name,
    server_of,
)

_HEALTH_DEADLINE_S = 20.0  # SGLang's


async def models(request: Request) -> Response:
    """List the model and the adapters that requests may name: ``/v1/models``."""
    server = server_of(request)
    name = model_name(server)
    cards = [{"id": name, "object": "model", "root": name, "parent": None, "max_model_len": server.model.max_tokens}]
    cards += [
        {"id": adapter.name, "object": "model", "root": adapter.path, "parent": name, "max_model_len": None}
        for adapter in server.adapters.listed.values()
    ]
    return json_response({"object": "list", "data": cards})


async def model_info(request: Request) -> Response:
    """Describe the served weights: ``/model_info``."""
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
    """Describe the process: ``/server_info``."""
    server = server_of(request)
    limits = server.engine.limits
    return json_response(
        {
            **server.settings.model_dump(mode="json"),
            "enable_lora": True,
            "version": ENGINE_VERSION,
            "frontend": "python",
            "uptime_s": time.monotonic() - server.started_at,
            "max_total_num_tokens": limits.max_total_tokens,
            "max_running_requests": limits.max_running,
            "context_length": server.model.max_tokens,
            "weight_version": server.engine.version,
            "is_paused": server.engine.paused,
        }
    )


async def weights_checker(request: Request) -> Response:
    """Return the checksum of the served weights: ``/weights_checker``."""
    await read_body(request, CheckWeightsBody)
    return json_response({"success": True, "message": "", **checksum_reply(server_of(request))})


async def health(request: Request) -> Response:
    """Answer 200 while the engine thread runs, paused or not: ``/health``."""
    return Response(status_code=200 if server_of(request).engine.is_alive else 503)


async def health_generate(request: Request) -> Response:
    """Generate one token and answer 200, or 503 when paused or too slow: ``/health_generate``."""
    server = server_of(request)
    if server.engine.paused:
        return PlainTextResponse("paused\n", status_code=503)
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    requested = build_job(GenerateBody(input_ids=[0], sampling_params=params), server.model)
    if not await server.jobs.within(requested, _HEALTH_DEADLINE_S):
        return PlainTextResponse(f"no token within {_HEALTH_DEADLINE_S:.0f} s\n", status_code=503)
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """Answer 200 while requests are computed, 503 while paused: ``/ready``."""
    engine = server_of(request).engine
    return Response(status_code=200 if engine.is_alive and not engine.paused else 503)


async def loads(request: Request) -> Response:
    """Report running and waiting requests and used tokens: ``/v1/loads``."""
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
    """Report all metrics for Prometheus: ``/metrics``."""
    return PlainTextResponse(render_metrics(server_of(request).engine), media_type=CONTENT_TYPE)
