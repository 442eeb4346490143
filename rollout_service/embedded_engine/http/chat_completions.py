"""``/v1/chat/completions``: the part of OpenAI's chat API needed to chat with a policy; text only, no tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.rollout_service.embedded_engine.http.bodies import Body, GenerateBody, SamplingParams
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob, ServedModel, build_job
from penstock.rollout_service.embedded_engine.http.replies import completion_texts
from penstock.rollout_service.embedded_engine.http.text import Text

_UNFINISHED_CHARACTER = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class Message(Body):
    """One turn of the conversation."""

    role: str
    content: str


class ChatBody(Body):
    """Body of ``/v1/chat/completions``; the defaults are OpenAI's."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str = ""  # one model is served; the reply repeats this name
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    logprobs: Literal[False] = False
    tools: None = None


def build_chat_job(body: ChatBody, model: ServedModel) -> RequestedJob:
    """Render the conversation and return the sequences that answer it.

    Raises:
        RequestRefused: no chat template, or the rendered conversation cannot be served.
    """
    rendered = model.text.render_chat([message.model_dump() for message in body.messages])
    params = SamplingParams(
        n=body.n,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=body.stop,
        sampling_seed=body.seed,
    )
    input_ids = model.text.encode(rendered, special=False)  # the template writes its own special tokens
    return build_job(GenerateBody(input_ids=input_ids, sampling_params=params), model)


def chat_reply(requested: RequestedJob, text: Text, model_name: str) -> dict[str, Any]:
    """Return OpenAI's ``chat.completion`` object for finished sequences."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "finish_reason": _reason(requested, index),
        }
        for index, content in enumerate(completion_texts(requested.sequences, requested.params, text))
    ]
    num_prompt = len(requested.sequences[0].prompt)
    num_completion = sum(len(sequence.output_ids) for sequence in requested.sequences)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
    metadata = {"weight_version": requested.sequences[0].final_version}
    return _envelope(requested, model_name, "chat.completion") | {
        "choices": choices,
        "usage": usage,
        "metadata": metadata,
    }


async def chat_chunks(
    requested: RequestedJob, steps: AsyncIterator[list[int]], text: Text, model_name: str
) -> AsyncIterator[dict[str, Any]]:
    """Yield OpenAI's ``chat.completion.chunk`` objects: the new part of each text, then the finish reasons.

    ``steps`` yields the token count of each sequence after every step, and ends when all have finished.
    """
    envelope = _envelope(requested, model_name, "chat.completion.chunk")
    sent = [""] * len(requested.sequences)

    def new_chunks(index: int, whole: str) -> list[dict[str, Any]]:
        new = whole[len(sent[index]) :]
        if not new:
            return []
        delta = {"content": new} if sent[index] else {"role": "assistant", "content": new}
        sent[index] = whole
        return [envelope | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}]

    async for counts in steps:
        for index, count in enumerate(counts):
            tokens = requested.sequences[index].output_ids[:count]
            whole = text.decode([tokens], skip_special_tokens=True)[0]
            # A partial stop string may have to be removed: requests with stop strings get their text at the end.
            if not requested.sequences[index].sampling.stop_strings and not whole.endswith(_UNFINISHED_CHARACTER):
                for chunk in new_chunks(index, whole):
                    yield chunk
    for index, whole in enumerate(completion_texts(requested.sequences, requested.params, text)):
        for chunk in new_chunks(index, whole):
            yield chunk
        yield envelope | {"choices": [{"index": index, "delta": {}, "finish_reason": _reason(requested, index)}]}


def _reason(requested: RequestedJob, index: int) -> str | None:
    finish = requested.sequences[index].finish
    return None if finish is None else finish.type


def _envelope(requested: RequestedJob, model_name: str, kind: str) -> dict[str, Any]:
    rid = requested.sequences[0].rid
    return {"id": f"chatcmpl-{rid}", "object": kind, "created": int(time.time()), "model": model_name}
