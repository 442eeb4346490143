"""Checked fields of a request's body; each error names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from penstock.agents.proxy.messages import (
    Lenience,
    Message,
    RequestRefused,
    ToolCall,
    constrained,
    invalid,
    unsupported,
)
from penstock.protocol.errors import ImageRefused
from penstock.protocol.images import admission

_T = TypeVar("_T")
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_STOP_CHARACTERS = 200
_MAX_TOOLS = 512
# Fields that are read, or change no answer; all others are counted where they ask for something.
_READ = {
    "model", "messages", "input", "instructions", "system", "tools", "tool_choice", "stream", "stream_options", "n", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "response_format", "text", "user", "metadata", "client_metadata", "store", "include",
    "service_tier", "cache_control", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
    "anthropic_version", "anthropic_beta", "betas",
}  # fmt: skip
_NOTHING: dict[str, tuple[Any, ...]] = {  # the values of a field that ask for nothing, where these are others than false and empty
    "temperature": (None,), "top_p": (None, 1), "top_k": (None, -1, 0), "seed": (None,), "repetition_penalty": (None, 1),
    "reasoning_effort": (None,), "thinking": (None,), "parallel_tool_calls": (None, True), "truncation": (None, "disabled"),
    "enable_thinking": (None,), "modalities": (None, ["text"]),
}  # fmt: skip
_MOST_COUNTED = 32  # of the fields of a request
_CONSTRAINTS = (
    "logit_bias", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "structured_outputs", "regex", "ebnf", "json_schema", "output_format", "structural_tag", "grammar", "allowed_token_ids", "bad_words",
)  # fmt: skip


def text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}{name} must be a text, got {type(value).__name__}", f"{where}{name}")
    return value


def optional_text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """Return a text, empty if the field is absent or null."""
    return "" if body.get(name) is None else text(body, name, where)


def objects(body: Mapping[str, Any], name: str, where: str = "") -> list[dict[str, Any]]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise invalid(f"{where}{name} must be a list of objects", f"{where}{name}")
    return value


def optional_object(body: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
    """Return an object, empty if the field is absent or null."""
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise invalid(f"{where}{name} must be an object, got {type(value).__name__}", f"{where}{name}")
    return value or {}


def content(value: Any, where: str, *, kinds: tuple[str, ...] = ("text",)) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid(f"{where} must be a text or a list of parts, got {type(value).__name__}", where)
    parts: list[str] = []
    for part in value:
        if isinstance(part, str):
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in admission.IMAGE_TYPES:
            raise unsupported("an image in a message of another role than user or tool", where)
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append(part["refusal"])
            continue
        if kind not in kinds:
            raise unsupported(f"a part of type {kind!r}", where)
        parts.append(text(part, "text", f"{where}."))
    return "\n".join(parts)


def parts(value: Any, where: str, *, kinds: tuple[str, ...] = ("text",)) -> tuple[str | bytes, ...]:
    """Return texts and images of a message's content in order; empty if it has no image. ``kinds`` are those of texts.

    Raises RequestRefused for an image that is not sent as base64, in a data URL or apart: URLs are never fetched.
    """
    if not isinstance(value, list) or not any(_is_image(part) for part in value):
        return ()
    read = (
        _image(p, f"{where}[{n}]") if _is_image(p) else content([p], where, kinds=kinds) for n, p in enumerate(value)
    )
    return tuple(read)


def message(
    role: str, value: Any, where: str, *, tool_call_id: str = "", name: str = "", kinds: tuple[str, ...] = ("text",)
) -> Message:
    """Return a message with the texts of a content, and with its images where the role may show some."""
    if shown := parts(value, where, kinds=kinds) if role in ("user", "tool") else ():
        return replace(Message.of_parts(role, *shown, tool_call_id=tool_call_id), name=name)
    return Message(role, content(value, where, kinds=kinds), tool_call_id=tool_call_id, name=name)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in admission.IMAGE_TYPES


def _image(part: dict[str, Any], where: str) -> bytes:
    try:
        (source,) = admission.take_images([{"content": [part]}])[1]
        return admission.image_bytes(source)
    except ImageRefused as err:
        raise invalid(f"{where}: {err}", where, code="image_refused") from None


def max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the smallest of several limits of an answer's tokens; None if there is none."""
    limits: list[int] = []
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise invalid(f"{name} must be a positive whole number, got {str(value)[:40]}", name)
        limits.append(value)
    return min(limits, default=None)


def stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(
        isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_CHARACTERS for stop in listed
    ):
        raise invalid(f"{name} must be texts of 1 to {_MAX_STOP_CHARACTERS} characters", name)
    return tuple(listed)


def overruled(body: Mapping[str, Any], temperature: float, *read: str) -> tuple[str, ...]:
    """Return the names of fields that ask for what only the task's sampling decides, or for what is not here; ``read``: the API's own."""
    nothing = (None, False, "", [], {})
    names = [
        _counted(name)
        for name, value in body.items()
        if name not in {*_READ, *read, *_CONSTRAINTS} and value not in _NOTHING.get(name, nothing)
        and (name != "temperature" or value != temperature)
    ]  # fmt: skip
    choice, tools = body.get("tool_choice"), [tool for tool in body.get("tools") or () if isinstance(tool, dict)]
    tools += [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        names.append("parallel_tool_calls")
    if any(tool.get("strict") for tool in tools):
        names.append("tools.strict")
    if any(_detail(part) not in (None, "auto") for part in _shown(body)):
        names.append("image_detail")  # the model's image processor decides the resolution
    return tuple(names[:_MOST_COUNTED])


def _shown(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the images among the parts of messages and items."""
    listed = body.get("messages") or body.get("input")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    contents = [entry.get("content") or entry.get("output") for entry in entries]
    return [part for parts in contents if isinstance(parts, list) for part in parts if _is_image(part)]


def _detail(part: Mapping[str, Any]) -> Any:
    shown = part.get("image_url")
    return part.get("detail") or (shown.get("detail") if isinstance(shown, dict) else None)


def _counted(name: str) -> str:
    return _NOT_A_NAME.sub("_", name)[:40]


def constraints(body: Mapping[str, Any], *others: str, lenience: Lenience) -> tuple[str, ...]:
    """Return the constraints of decoding that are ignored, ``others`` and a forced call among them; raises RequestRefused unless allowed."""
    names = [*others, *(name for name in _CONSTRAINTS if body.get(name))]
    if _choice(body) not in (None, "auto", "none"):
        names.append("tool_choice")
    if names and not lenience.ignores_constraints:
        raise constrained(names[0])
    return tuple(names)


def reads_calls(body: Mapping[str, Any]) -> bool:
    return _choice(body) != "none"


def _choice(body: Mapping[str, Any]) -> Any:
    value = body.get("tool_choice")
    return value.get("type") if isinstance(value, dict) else value


def known(
    values: Sequence[dict[str, Any]], read: Callable[[dict[str, Any], int], _T], what: str, lenience: Lenience
) -> tuple[list[_T], tuple[str, ...]]:
    """Return what ``read`` makes of each value, and the names of kinds that it does not know; raises RequestRefused unless allowed."""
    read_values: list[_T] = []
    dropped: list[str] = []
    for number, value in enumerate(values):
        try:
            read_values.append(read(value, number))
        except RequestRefused as err:
            if err.code != "unsupported" or not lenience.drops_unknown:
                raise
            dropped.append(f"{what}.{_counted(str(value.get('type')))}")
    return read_values, tuple(dropped)


def refuse_present(body: Mapping[str, Any], *names: str, where: str = "") -> None:
    for name in names:
        if body.get(name):
            raise unsupported(name, f"{where}{name}")


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise invalid(f"{where}.name must be a text of 1 to 256 characters", where)
    if description is not None and not isinstance(description, str):
        raise invalid(f"{where}.description must be a text", where)
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.parameters must be an object", where)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def check_tools(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    if len(tools) > _MAX_TOOLS:
        raise invalid(f"{len(tools)} tools, at most {_MAX_TOOLS}", "tools")
    return tuple(tools)


def call(identifier: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    if arguments is None or isinstance(arguments, dict):  # as clients of Ollama write them
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(name, str) or not isinstance(arguments, str) or not isinstance(identifier, str | None):
        raise invalid(f"{where} needs id, name and arguments as texts", where)
    return ToolCall(identifier or "", name, arguments)


def with_call_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Give results of tools without an id those of the calls before them, in order; raises RequestRefused where there is none."""
    made: list[Message] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if message.role == "assistant":
            waiting = [call.id for call in message.tool_calls]
        elif message.role == "tool" and not message.tool_call_id:
            if not waiting:
                raise invalid(
                    f"messages[{number}] is the result of a tool, and no call before it waits for one", "messages"
                )
            message = replace(message, tool_call_id=waiting[0])
        if message.role == "tool" and message.tool_call_id in waiting:
            waiting.remove(message.tool_call_id)
        made.append(message)
    return tuple(made)
