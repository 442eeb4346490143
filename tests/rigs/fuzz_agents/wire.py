"""The same messages in the wire forms of three APIs, and answers of each as one message."""

from __future__ import annotations

import json
from typing import Any

PATHS = {"chat": "/chat/completions", "responses": "/responses", "anthropic": "/messages"}
_LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "anthropic": "max_tokens"}
Messages = list[dict[str, Any]]


def body_of(api: str, messages: Messages, tools: Messages, *, stream: bool, max_tokens: int | None) -> dict[str, Any]:
    functions = [tool["function"] for tool in tools]
    body: dict[str, Any] = {"model": "m", **({"stream": True} if stream else {})}
    if max_tokens is not None:
        body[_LIMITS[api]] = max_tokens
    if api == "chat":
        return {**body, "messages": messages, "tools": tools}
    if api == "responses":
        listed = [{"type": "function", **function} for function in functions]
        return {**body, "input": [item for one in messages for item in _items(one)], "tools": listed}
    listed = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    head = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns: Messages = []
    for one in messages[0 if head is None else 1 :]:
        role = "assistant" if one["role"] == "assistant" else "user"
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += _blocks(one)
    return {**body, "messages": turns, "tools": listed, **({} if head is None else {"system": head})}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _items(message: dict[str, Any]) -> Messages:
    text = _text(message.get("content"))
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}]
    items: Messages = []
    if message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "summary": [], "content": parts})
    calls = message.get("tool_calls") or []
    if text or not calls:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        items.append({"type": "message", "role": message["role"], "content": [{"type": kind, "text": text}]})
    return [*items, *({"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls)]


def _blocks(message: dict[str, Any]) -> Messages:
    text = _text(message.get("content"))
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    blocks: Messages = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "penstock"})
    calls = message.get("tool_calls") or []
    if text or not (calls or blocks):
        blocks.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def message_of(api: str, reply: bytes) -> dict[str, Any]:
    """Return an answer, streamed or not, as a message of chat completions; raises for a stream without its last event."""
    streamed = [json.loads(line[6:]) for line in reply.decode().splitlines() if line.startswith("data: {")]
    whole = json.loads(reply) if reply[:1] == b"{" else None
    if api == "chat":
        assert whole is not None or reply.endswith(b"data: [DONE]\n\n"), reply[-200:]
        return whole["choices"][0]["message"] if whole else _of_deltas(streamed)
    if api == "responses":
        items = (whole or streamed[-1]["response"])["output"]
        parts = [("".join(part["text"] for part in item.get("content", ())), item) for item in items]
        calls = [
            _call(item["call_id"], item["name"], item["arguments"])
            for _, item in parts
            if item["type"] == "function_call"
        ]
        texts = {
            kind: "".join(text for text, item in parts if item["type"] == kind) for kind in ("message", "reasoning")
        }
        return _message(texts["message"], texts["reasoning"], calls)
    assert whole is not None or streamed[-1] == {"type": "message_stop"}, reply[-200:]
    blocks = whole["content"] if whole else _of_events(streamed)
    calls = [_call(one["id"], one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use"]
    return _message(*("".join(one.get(kind, "") for one in blocks) for kind in ("text", "thinking")), calls)


def _call(name_of_call: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": name_of_call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message(content: str, reasoning: str, calls: Messages) -> dict[str, Any]:
    more = {"reasoning_content": reasoning, "tool_calls": calls}
    return {"role": "assistant", "content": content, **{key: value for key, value in more.items() if value}}


def _of_deltas(chunks: Messages) -> dict[str, Any]:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
    calls = [
        {key: value for key, value in call.items() if key != "index"}
        for one in deltas
        for call in one.get("tool_calls", ())
    ]
    texts = ("".join(one.get(name) or "" for one in deltas) for name in ("content", "reasoning_content"))
    return _message(*texts, calls)


def _of_events(events: Messages) -> Messages:
    blocks: Messages = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            for name in ("text", "thinking"):
                blocks[-1][name] = blocks[-1].get(name, "") + delta[name] if name in delta else blocks[-1].get(name, "")
    return blocks
