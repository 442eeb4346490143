"""``POST /v1/responses``: bodies → requests, turns → replies and streams; pure.

Stored responses, server-side tools and encrypted reasoning have no counterpart here, and are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.agents.proxy.api import chat_completions, fields
from penstock.agents.proxy.messages import STRICT, AgentRequest, Lenience, Message, invalid, unsupported
from penstock.agents.proxy.tree import SampledTurn

PREFIX: str = "resp_"  # of the ids of answers
error = chat_completions.error
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_request(body: Mapping[str, Any], temperature: float, lenience: Lenience = STRICT) -> AgentRequest:
    fields.refuse_present(body, "previous_response_id", "conversation", "background", "prompt", "top_logprobs")
    if "message.output_text.logprobs" in (body.get("include") or ()):
        raise unsupported("log-probabilities", "include")
    form = fields.optional_object(fields.optional_object(body, "text"), "format", "text.")
    is_free = form.get("type", "text") == "text"
    ignored = fields.constraints(body, *([] if is_free else ["text.format"]), lenience=lenience)
    instructions = fields.optional_text(body, "instructions")
    messages = [Message("system", instructions)] if instructions else []
    user_input = body.get("input")
    unknown: tuple[str, ...] = ()
    if isinstance(user_input, str):
        messages.append(Message("user", user_input))
    else:
        items, unknown = fields.known(fields.objects(body, "input"), _checked_item, "input", lenience)
        messages += _messages(items)
    tools, dropped = fields.known(list(_functions(body)), _tool, "tools", lenience)
    return AgentRequest(
        messages=tuple(messages), tools=fields.check_tools(tools),
        max_tokens=fields.max_tokens(body, "max_output_tokens"), reads_calls=fields.reads_calls(body),
        overruled=(*fields.overruled(body, temperature), *ignored, *unknown, *dropped),
    )  # fmt: skip


def _checked_item(item: dict[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    """Return an item and where it stands; raises RequestRefused for one of a kind that has no counterpart."""
    where, kind = f"input[{number}]", item.get("type", "message")
    if kind not in ("message", "function_call", "function_call_output", "reasoning"):
        raise unsupported(f"an item of type {str(kind)[:40]!r}", where)
    if kind == "reasoning" and item.get("encrypted_content") and not item.get("content"):
        raise unsupported("encrypted reasoning", where)
    return where, item


def _functions(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tools; those of a namespace with its name before their own, as calls and their items have it here."""
    for number, value in enumerate(fields.objects(body, "tools")):
        where = f"tools[{number}]."
        if value.get("type") != "namespace":
            if "." in str(value.get("name")):
                raise invalid(
                    f"{where}name has a dot, which stands behind the name of a namespace: leave it out", where
                )
            yield value
            continue
        for tool in fields.objects(value, "tools", where):
            yield {**tool, "name": f"{fields.text(value, 'name', where)}.{fields.optional_text(tool, 'name', where)}"}


def _tool(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    where = f"tools[{number}]"
    if value.get("type") != "function":
        raise unsupported(f"a tool of type {str(value.get('type'))[:40]!r}", where)
    return fields.function_tool(value.get("name"), value.get("description"), value.get("parameters"), where)


def _messages(items: list[tuple[str, dict[str, Any]]]) -> list[Message]:
    messages: list[Message] = []
    answer: dict[str, Any] = {}

    def end_answer() -> None:
        if answer:
            content, reasoning = ("\n".join(answer.get(name, [])) for name in ("content", "reasoning"))
            messages.append(Message("assistant", content, reasoning, tuple(answer.get("calls", []))))
            answer.clear()

    for where, item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            end_answer()
            messages.append(_result(item, where))
        elif kind == "function_call":
            name, space = item.get("name"), fields.optional_text(item, "namespace", f"{where}.")
            name = f"{space}.{name}" if space else name
            call = fields.call(item.get("call_id"), name, item.get("arguments"), where)
            answer.setdefault("calls", []).append(call)
        elif kind == "reasoning":
            if answer.get("calls") or answer.get("content"):
                end_answer()  # the reasoning of the next answer
            answer.setdefault("reasoning", []).append(fields.content(item.get("content"), where, kinds=_TEXTS))
        else:
            _add_message(item, where, messages, answer, end_answer)
    end_answer()
    return messages


def _result(item: Mapping[str, Any], where: str) -> Message:
    call_id = fields.text(item, "call_id", f"{where}.")
    return fields.message("tool", item.get("output"), f"{where}.output", tool_call_id=call_id, kinds=_TEXTS)


def _add_message(
    item: Mapping[str, Any], where: str, messages: list[Message], answer: dict[str, Any], end_answer: Any
) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        if answer.get("calls"):
            end_answer()
        answer.setdefault("content", []).append(fields.content(content, f"{where}.content", kinds=_TEXTS))
        return
    end_answer()
    if role not in ("user", "system", "developer"):
        raise invalid(f"{where}.role must be user, system, developer or assistant, got {str(role)[:40]!r}", where)
    role = "user" if role == "user" else "system"
    messages.append(fields.message(role, content, f"{where}.content", kinds=_TEXTS))


def reply(turn: SampledTurn, model: str, created: int, request_id: str) -> dict[str, Any]:
    is_cut = turn.finish_reason == "length"
    return {
        "id": request_id, "object": "response", "created_at": created, "model": model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(turn.answer, request_id),
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(turn.token_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_tokens,
        },
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None,
        "top_p": None, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def output_items(answer: Message, of: str) -> list[dict[str, Any]]:
    """Return an answer as items of the Responses API, with ids that end with ``of``; those of calls end with the calls' ids."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"id": f"rs_{of}", "type": "reasoning", "summary": [], "content": content})
    if answer.content or not answer.tool_calls:
        content = [{"type": "output_text", "text": answer.content, "annotations": []}]
        head = {"id": f"msg_{of}", "type": "message", "role": "assistant"}
        items.append({**head, "status": "completed", "content": content})
    for call in answer.tool_calls:
        space, _, name = call.name.rpartition(".")
        head = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": name}
        head |= {"namespace": space} if space else {}
        items.append({**head, "arguments": call.arguments, "status": "completed"})
    return items


def events(turn: SampledTurn, body: Mapping[str, Any], model: str, created: int, request_id: str) -> list[bytes]:
    del body
    whole = reply(turn, model, created, request_id)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    made: list[dict[str, Any]] = [
        {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"content": []}}
        opened = {**item, **empty[item["type"]], "status": "in_progress"}
        made.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        if item["type"] == "function_call":
            arguments = item["arguments"]
            done = {**place, "arguments": arguments, "name": item["name"]}
            made.append({"type": "response.function_call_arguments.delta", **place, "delta": arguments})
            made.append({"type": "response.function_call_arguments.done", **done})
        else:
            made += _text_events(item, {**place, "content_index": 0})
        made.append({"type": "response.output_item.done", "output_index": index, "item": item})
    made.append({"type": f"response.{whole['status']}", "response": whole})
    return [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()
        for number, event in enumerate(made)
    ]


def _text_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> list[dict[str, Any]]:
    part = item["content"][0]
    kind = part["type"]
    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    return [
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": f"response.{kind}.delta", **place, "delta": part["text"], **more},
        {"type": f"response.{kind}.done", **place, "text": part["text"], **more},
        {"type": "response.content_part.done", **place, "part": part},
    ]
