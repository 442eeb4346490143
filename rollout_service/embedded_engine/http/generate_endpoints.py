"""The endpoints that sample, and their replies: SGLang's ``/generate`` and OpenAI's ``/v1/chat/completions``.

Of the chat API only what is needed to chat with a policy is served: whole answers of text, no tools.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as Items
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.rollout_service.embedded_engine.errors import EngineAtFault, EngineStopped
from penstock.rollout_service.embedded_engine.http.bodies import Body, GenerateBody, SamplingParams
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob, ServedModel, Text, build_job
from penstock.rollout_service.embedded_engine.http.server_state import (
    ServerState,
    event,
    json_response,
    model_name,
    read_body,
    server_of,
)
from penstock.rollout_service.embedded_engine.sequence import Sequence


def build_replies(requested: RequestedJob, text: Text) -> list[dict[str, Any]]:
    texts = completion_texts(requested.sequences, requested.params, text)
    return [
        _reply(requested, sequence, completion) for sequence, completion in zip(requested.sequences, texts, strict=True)
    ]


def build_chunk(requested: RequestedJob, index: int, num_tokens: int, version: str, text: Text) -> dict[str, Any]:
    sequence = requested.sequences[index]
    tokens = sequence.output_ids[:num_tokens]
    completion = text.decode([tokens], skip_special_tokens=True)[0]
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": None,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": version,
    }
    if requested.return_logprob:
        meta |= _output_logprobs(tokens, sequence.output_logprobs[:num_tokens])
    return {"text": completion, "output_ids": tokens, "meta_info": meta}


def completion_texts(sequences: Items[Sequence], params: Items[SamplingParams], text: Text) -> list[str]:
    if not text.has_tokenizer:
        return [""] * len(sequences)
    rows = [_visible_tokens(sequence, requested) for sequence, requested in zip(sequences, params, strict=True)]
    texts = text.decode(rows, skip_special_tokens=True)
    return [_cut(*item) for item in zip(texts, sequences, params, strict=True)]


def _visible_tokens(sequence: Sequence, params: SamplingParams) -> list[int]:
    stopped_by_token = sequence.finish is not None and isinstance(sequence.finish.matched, int)
    return sequence.output_ids[:-1] if stopped_by_token and not params.no_stop_trim else sequence.output_ids


def _cut(completion: str, sequence: Sequence, params: SamplingParams) -> str:
    matched = sequence.finish.matched if sequence.finish is not None else None
    if not isinstance(matched, str):
        return completion
    return completion if params.no_stop_trim else completion.partition(matched)[0]


def _reply(requested: RequestedJob, sequence: Sequence, completion: str) -> dict[str, Any]:
    finish = sequence.finish
    assert finish is not None
    num_tokens = len(sequence.output_ids)
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": finish.to_json(num_tokens),
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": sequence.final_version,
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in sequence.spans],
        "num_retractions": sequence.num_retractions,
    }
    if requested.return_logprob:
        meta |= _output_logprobs(sequence.output_ids, sequence.output_logprobs)
    if sequence.experts is not None:
        meta["routed_experts"] = _routed_experts(sequence, requested)
    if sequence.input_logprobs_from is not None and sequence.input_logprobs is not None:
        tokens = sequence.prompt[sequence.input_logprobs_from :]
        meta["input_token_logprobs"] = _triples((None, *sequence.input_logprobs), tokens)
    if sequence.input_top_logprobs is not None:
        tops = [[(logprob, token, None) for logprob, token in place] for place in sequence.input_top_logprobs]
        meta["input_top_logprobs"] = [None, *tops]
    reply: dict[str, Any] = {"text": completion, "output_ids": sequence.output_ids, "meta_info": meta}
    if requested.return_prompt_token_ids:
        reply["prompt_token_ids"] = sequence.prompt
    return reply


def _routed_experts(sequence: Sequence, requested: RequestedJob) -> str:
    """Return SGLang's ``routed_experts``: base64 of int32 [tokens - 1, layers, k], zero in layers without experts."""
    assert sequence.experts is not None
    chosen = sequence.experts[: sequence.num_tokens - 1]
    table = np.zeros((len(chosen), requested.num_layers, chosen.shape[2]), dtype="<i4")
    table[:, list(requested.expert_layers)] = chosen
    return base64.b64encode(table.tobytes()).decode("ascii")


def _output_logprobs(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"output_token_logprobs": _triples(logprobs, tokens), "output_token_logprobs_length": len(tokens)}


def _triples(logprobs: Iterable[float | None], tokens: Iterable[int]) -> list[tuple[float | None, int, None]]:
    return [(logprob, token, None) for logprob, token in zip(logprobs, tokens, strict=True)]


class Message(Body):
    role: str
    content: str


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1)]
    model: str = ""  # one model is served; the reply repeats this name
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: Literal[False] = False
    logprobs: Literal[False] = False
    tools: None = None


def build_chat_job(body: ChatBody, model: ServedModel) -> RequestedJob:
    rendered = model.text.render_chat([message.model_dump() for message in body.messages])
    params = SamplingParams(
        n=body.n,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=body.stop,
        sampling_seed=body.seed,
    )
    input_ids = model.text.encode(rendered, special=False)  # the template writes the special tokens itself
    return build_job(GenerateBody(input_ids=input_ids, sampling_params=params), model)


def chat_reply(requested: RequestedJob, text: Text, model_name: str) -> dict[str, Any]:
    texts = completion_texts(requested.sequences, requested.params, text)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "finish_reason": None if sequence.finish is None else sequence.finish.type,
        }
        for index, (sequence, content) in enumerate(zip(requested.sequences, texts, strict=True))
    ]
    first = requested.sequences[0]
    num_completion = sum(len(sequence.output_ids) for sequence in requested.sequences)
    return {
        "id": f"chatcmpl-{first.rid}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": choices,
        "usage": {
            "prompt_tokens": len(first.prompt),
            "completion_tokens": num_completion,
            "total_tokens": len(first.prompt) + num_completion,
        },
        "metadata": {"weight_version": first.final_version},
    }


async def generate(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, GenerateBody)
    requested = build_job(body, server.model, await server.images.read(body))
    if body.stream:
        return StreamingResponse(_events(_generate_chunks(server, requested)), media_type="text/event-stream")
    await server.jobs.run_to_end(request, requested)
    replies = build_replies(requested, server.text)
    return json_response(replies if requested.is_list else replies[0])


async def chat_completions(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, ChatBody)
    requested = build_chat_job(body, server.model)
    name = body.model or model_name(server)
    await server.jobs.run_to_end(request, requested)
    return json_response(chat_reply(requested, server.text, name))


async def _generate_chunks(server: ServerState, requested: RequestedJob) -> AsyncIterator[dict[str, Any]]:
    """Yield cumulative chunks while sampling, then the full reply of each sequence."""
    sent = [0] * len(requested.sequences)
    async for counts in server.jobs.steps(requested):
        for index, count in enumerate(counts):
            if count > sent[index]:
                sent[index] = count
                yield build_chunk(requested, index, count, server.engine.version, server.text) | {"index": index}
    for index, reply in enumerate(build_replies(requested, server.text)):
        yield reply | {"index": index}


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield server-sent events; an error is an event too, because the status has been sent already."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except (EngineStopped, EngineAtFault) as error:
        yield event({"error": {"message": str(error), "type": type(error).__name__, "code": 500, "retryable": True}})
    yield b"data: [DONE]\n\n"
