"""``POST /v1/chat/completions``: bodies → requests, turns → replies and streams; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.agents.proxy.api import fields
from penstock.agents.proxy.messages import STRICT, AgentRequest, Lenience, Message, RequestRefused, invalid, unsupported
from penstock.agents.proxy.tree import SampledTurn

PREFIX: str = "chatcmpl-"  # of the ids of answers
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_request(body: Mapping[str, Any], temperature: float, lenience: Lenience = STRICT) -> AgentRequest:
    fields.refuse_present(body, "functions", "function_call", "audio", "prediction", "logprobs", "top_logprobs")
    if body.get("n") not in (None, 1):
        raise unsupported("n > 1: one request has one answer", "n")
    form = body.get("response_format")
    is_free = form is None or (isinstance(form, dict) and form.get("type") == "text")
    ignored = fields.constraints(body, *([] if is_free else ["response_format"]), lenience=lenience)
    listed = fields.objects(body, "messages")
    tools, dropped = fields.known(fields.objects(body, "tools"), _tool, "tools", lenience)
    messages = [read_message(entry, f"messages[{number}]") for number, entry in enumerate(listed)]
    return AgentRequest(
        messages=fields.with_call_ids(messages), tools=fields.check_tools(tools), stop=fields.stop_strings(body, "stop"),
        max_tokens=fields.max_tokens(body, "max_tokens", "max_completion_tokens"), reads_calls=fields.reads_calls(body),
        overruled=(*fields.overruled(body, temperature, "stop"), *ignored, *dropped),
    )  # fmt: skip


def _tool(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    where = f"tools[{number}]"
    function = value.get("function")
    if value.get("type") != "function" or not isinstance(function, dict):
        raise unsupported(f"a tool of type {str(value.get('type'))[:40]!r}", where)
    return fields.function_tool(function.get("name"), function.get("description"), function.get("parameters"), where)


def read_message(value: Mapping[str, Any], where: str) -> Message:
    role = value.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}, got {str(role)[:40]!r}", f"{where}.role")
    content, at = value.get("content"), f"{where}."
    if role != "assistant":
        call_id = fields.optional_text(value, "tool_call_id", at) if role == "tool" else ""
        name = fields.optional_text(value, "name", at)
        role = "system" if role == "developer" else role
        return fields.message(role, content, f"{at}content", tool_call_id=call_id, name=name)
    fields.refuse_present(value, "function_call", "audio", where=at)
    calls = fields.objects(value, "tool_calls", at)
    reasoning = next((name for name in ("reasoning_content", "reasoning") if value.get(name) is not None), None)
    return Message(
        "assistant", fields.content(content or value.get("refusal"), f"{at}content"), fields.text(value, reasoning, at) if reasoning else "",
        tuple(_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)),
    )  # fmt: skip


def _call(value: Mapping[str, Any], where: str) -> Any:
    function = value.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function must be an object", where)
    return fields.call(value.get("id"), function.get("name"), function.get("arguments"), where)


def finish_reason(turn: SampledTurn) -> str:
    if turn.answer.tool_calls:
        return "tool_calls"
    return "length" if turn.finish_reason == "length" else "stop"


def usage(turn: SampledTurn) -> dict[str, int]:
    prompt, completion = turn.prompt_tokens, len(turn.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def reply(turn: SampledTurn, model: str, created: int, request_id: str) -> dict[str, Any]:
    answer = turn.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if not answer.tool_calls:
        message["content"] = answer.content
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [call.as_dict() for call in answer.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(turn)}
    return {
        "id": request_id, "object": "chat.completion", "created": created, "model": model, "choices": [choice],
        "usage": usage(turn),
    }  # fmt: skip


def events(turn: SampledTurn, body: Mapping[str, Any], model: str, created: int, request_id: str) -> list[bytes]:
    answer = turn.answer
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.reasoning:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.content:
        deltas.append({"content": answer.content})
    deltas += [{"tool_calls": [{"index": n, **call.as_dict()}]} for n, call in enumerate(answer.tool_calls)]
    head = {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model}
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]} for delta in deltas
    ]
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason(turn)}
    chunks.append({**head, "choices": [end]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage(turn)})
    return [*map(_event, chunks), b"data: [DONE]\n\n"]


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def error(refused: RequestRefused) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}
