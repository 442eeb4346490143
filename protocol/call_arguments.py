"""The arguments of tool calls in the form that a chat template writes as JSON: an object, or the JSON text of one; pure.

Data and clients have both forms. A template with ``tojson`` would quote a text a second time, one that prints what it is given
would write an object as Python does. Which form a template takes is seen from its renderings of one call in both forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from penstock.protocol.errors import TemplateRefused

ArgumentsForm = Literal["object", "text", "either"]
Messages = Sequence[Mapping[str, Any]]

_ARGUMENTS = {"word": "sun"}


def arguments_form(render: Callable[[Messages], str]) -> ArgumentsForm:
    """Return the form in which ``render`` shows the arguments of a call unquoted; either, if both or none are."""
    shows_object, shows_text = (_shows(render, arguments) for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)))
    if shows_object == shows_text:
        return "either"
    return "object" if shows_object else "text"


def with_arguments(messages: Messages, form: ArgumentsForm) -> list[dict[str, Any]]:
    """Return messages whose calls have their arguments in a form; a text that is not a JSON object stays as it is."""
    return [
        {**message, "tool_calls": [_call(call, form) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def parsed_arguments(arguments: Any) -> dict[str, Any] | None:
    """Return the object that arguments are, or are the JSON text of; None for anything else."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def _call(call: Any, form: ArgumentsForm) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], form)}
    arguments = call.get("arguments")
    if form == "object" and isinstance(arguments, str) and (parsed := parsed_arguments(arguments)) is not None:
        return {**call, "arguments": parsed}
    if form == "text" and isinstance(arguments, dict):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call


def _shows(render: Callable[[Messages], str], arguments: Any) -> bool:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
    try:
        text = render([{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except TemplateRefused:
        return False
    return "sun" in text and '\\"word' not in text and "'word'" not in text
