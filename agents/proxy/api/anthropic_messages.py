"""``POST /v1/messages``, Anthropic's API: bodies → requests, turns → replies and streams; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agents.proxy.api import fields
from penstock.agents.proxy.messages import (
    STRICT,
    AgentRequest,
    Lenience,
    Message,
    RequestRefused,
    ToolCall,
    invalid,
    unsupported,
)
from penstock.agents.proxy.tree import SampledTurn

PREFIX: str = "msg_"  # of the ids of answers
_SIGNATURE = "penstock"


def read_request(body: Mapping[str, Any], temperature: float, lenience: Lenience = STRICT) -> AgentRequest:
    fields.refuse_present(body, "mcp_servers", "container")
    form = fields.optional_object(body, "output_config").get("format")
    ignored = fields.constraints(body, *(["output_config.format"] if form else []), lenience=lenience)
    messages: list[Message] = []
    system = fields.content(body.get("system"), "system")
    if system:
        messages.append(Message("system", system))
    listed = fields.objects(body, "messages")
    for number, entry in enumerate(listed):
        messages += _messages(entry, f"messages[{number}]")
    hidden = sum(block.get("type") == "redacted_thinking" for entry in listed for block in _blocks(entry))
    tools, dropped = fields.known(fields.objects(body, "tools"), _tool, "tools", lenience)
    return AgentRequest(
        messages=tuple(messages), tools=fields.check_tools(tools), stop=fields.stop_strings(body, "stop_sequences"),
        max_tokens=fields.max_tokens(body, "max_tokens"), reads_calls=fields.reads_calls(body),
        overruled=(*fields.overruled(body, temperature, "stop_sequences"), *ignored, *dropped, *["redacted_thinking"] * hidden),
    )  # fmt: skip


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else fields.objects(message, "content")


def _tool(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    where = f"tools[{number}]"
    if value.get("type") not in (None, "custom"):
        raise unsupported(f"a tool of type {str(value.get('type'))[:40]!r}", where)
    return fields.function_tool(value.get("name"), value.get("description"), value.get("input_schema"), where)


def _messages(value: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of one message: the results of tools are blocks of a user's message here."""
    role = value.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role must be user, assistant or system, got {str(role)[:40]!r}", f"{where}.role")
    blocks = _blocks(value)
    if role == "assistant":
        return [_answer(blocks, where)]
    messages: list[Message] = []
    texts: list[str | bytes] = []
    for number, block in enumerate(blocks):
        at = f"{where}.content[{number}]"
        if block.get("type") == "tool_result":
            call_id = fields.text(block, "tool_use_id", f"{at}.")
            inside = block.get("content")
            if isinstance(inside, list):
                inside = [_as_text(one, at) if isinstance(one, dict) else one for one in inside]
            messages.append(fields.message("tool", inside, at, tool_call_id=call_id))
        elif block.get("type") == "image" and role == "user":
            texts += fields.parts([block], at)
        else:
            texts.append(fields.content([_as_text(block, at)], at))
    return [*messages, Message.of_parts(role, *texts)] if texts or not messages else messages


def _as_text(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the text block of a document of text, a search result or a reference to a tool; other blocks as they are."""
    match block.get("type"):
        case "document" if isinstance(source := block.get("source"), dict) and source.get("type") in (
            "text",
            "content",
        ):
            inside = source.get("data") if source["type"] == "text" else source.get("content")
            heads = [block.get("title"), block.get("context")]
        case "search_result":
            inside, heads = block.get("content"), [block.get("title"), block.get("source")]
        case "tool_reference":
            inside, heads = fields.text(block, "tool_name", f"{where}."), []
        case "document":
            raise unsupported("a document that is not a text", where)
        case _:
            return block
    return {
        "type": "text",
        "text": "\n".join([*(one for one in heads if isinstance(one, str)), fields.content(inside, where)]),
    }


def _answer(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        at = f"{where}.content[{number}]"
        match block.get("type"):
            case "text":
                texts.append(fields.text(block, "text", f"{at}."))
            case "thinking":
                reasoning.append(fields.text(block, "thinking", f"{at}."))
            case "tool_use" if isinstance(block.get("input"), dict):
                arguments = json.dumps(block["input"], ensure_ascii=False)
                calls.append(fields.call(block.get("id"), block.get("name"), arguments, at))
            case "redacted_thinking":  # of another model: the policy's own is never hidden
                pass
            case other:
                raise unsupported(f"a block of type {str(other)[:40]!r}", at)
    return Message("assistant", "\n".join(texts), "\n".join(reasoning), tuple(calls))


def _stop_reason(turn: SampledTurn) -> str:
    if turn.answer.tool_calls:
        return "tool_use"
    if turn.stop_sequence is not None:
        return "stop_sequence"
    return "max_tokens" if turn.finish_reason == "length" else "end_turn"


def reply(turn: SampledTurn, model: str, created: int, request_id: str) -> dict[str, Any]:
    del created
    answer = turn.answer
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE})
    if answer.content or not (answer.tool_calls or answer.reasoning):
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return {
        "id": request_id, "type": "message", "role": "assistant", "model": model, "content": blocks,
        "stop_reason": _stop_reason(turn), "stop_sequence": turn.stop_sequence,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.token_ids)},
    }  # fmt: skip


def events(turn: SampledTurn, body: Mapping[str, Any], model: str, created: int, request_id: str) -> list[bytes]:
    del body
    whole = reply(turn, model, created, request_id)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    made: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(whole["content"]):
        opened, deltas = _block_events(block)
        made.append({"type": "content_block_start", "index": index, "content_block": opened})
        made += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        made.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    made.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": whole["usage"]["output_tokens"]}})
    made.append({"type": "message_stop"})
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in made]


def _block_events(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    match block["type"]:
        case "thinking":
            return {**block, "thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "tool_use":
            written = json.dumps(block["input"])
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def error(refused: RequestRefused) -> dict[str, Any]:
    kinds = {
        401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
        504: "timeout_error",
    }  # fmt: skip
    kind = kinds.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": f"{refused.code}: {refused}"}}
