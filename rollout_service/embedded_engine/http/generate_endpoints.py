"""The endpoints that sample: ``/generate`` and ``/v1/chat/completions``, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.rollout_service.embedded_engine.errors import EngineAtFault, EngineStopped
from penstock.rollout_service.embedded_engine.http.bodies import GenerateBody
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob, build_job
from penstock.rollout_service.embedded_engine.http.chat_completions import (
    ChatBody,
    build_chat_job,
    chat_chunks,
    chat_reply,
)
from penstock.rollout_service.embedded_engine.http.replies import build_chunk, build_replies
from penstock.rollout_service.embedded_engine.http.request_errors import read_body
from penstock.rollout_service.embedded_engine.http.responses import event, json_response
from penstock.rollout_service.embedded_engine.http.server_state import ServerState, model_name, server_of


async def generate(request: Request) -> Response:
    """Sample completions: ``/generate``."""
    server = server_of(request)
    body = await read_body(request, GenerateBody)
    requested = build_job(body, server.model, await server.images.read(body))
    if body.stream:
        return StreamingResponse(_events(_generate_chunks(server, requested)), media_type="text/event-stream")
    latency_s = await server.jobs.run_to_end(request, requested)
    replies = build_replies(requested, server.text, latency_s)
    return json_response(replies if requested.is_list else replies[0])


async def chat_completions(request: Request) -> Response:
    """Answer a conversation: ``/v1/chat/completions``."""
    server = server_of(request)
    body = await read_body(request, ChatBody)
    requested = build_chat_job(body, server.model)
    name = body.model or model_name(server)
    if body.stream:
        chunks = chat_chunks(requested, server.jobs.steps(requested), server.text, name)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")
    await server.jobs.run_to_end(request, requested)
    return json_response(chat_reply(requested, server.text, name))


async def _generate_chunks(server: ServerState, requested: RequestedJob) -> AsyncIterator[dict[str, Any]]:
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
