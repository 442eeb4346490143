"""Which conversations a model's chat template continues without changing what stands before; pure.

Where it changes it, rendering a history again would give other tokens than were sampled. The proxy does not render it again, so it
continues the recorded tokens in every shape with a bridge; the table says how far a prompt made so is from the template's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agents.proxy.messages import Message, ToolCall
from penstock.agents.proxy.renderer import AnswerEnd, ChatRenderer
from penstock.protocol.errors import MalformedData

_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    },
)
_CALL = ToolCall("call_000000001", "look", '{"word": "sun"}')
_OTHER = ToolCall("call_000000002", "look", '{"word": "moon"}')
_RESULT, _OTHER_RESULT = (Message("tool", one, tool_call_id=n.id) for one, n in (("star", _CALL), ("rock", _OTHER)))
_USER = Message("user", "Hello.")
_NEXT = Message("user", "Go on.")

SHAPES: dict[str, tuple[Message, tuple[Message, ...], bool]] = {
    "answer, then user": (Message("assistant", "Yes."), (_NEXT,), False),
    "reasoning and answer, then user": (Message("assistant", "Yes.", "Let me see."), (_NEXT,), False),
    "call, then result": (Message("assistant", "", "", (_CALL,)), (_RESULT,), True),
    "text and call, then result": (Message("assistant", "I look.", "", (_CALL,)), (_RESULT,), True),
    "reasoning and call, then result": (Message("assistant", "", "Let me see.", (_CALL,)), (_RESULT,), True),
    "two calls, then two results": (
        Message("assistant", "", "", (_CALL, _OTHER)),
        (_RESULT, _OTHER_RESULT),
        True,
    ),
    "call, then result and user": (Message("assistant", "", "", (_CALL,)), (_RESULT, _NEXT), True),
    "call, then user": (Message("assistant", "", "", (_CALL,)), (_NEXT,), True),
}


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """What a template does with one shape."""

    shape: str
    renders: bool
    append_only: bool  # the longer rendering begins with the shorter one
    has_bridge: bool
    same_bridge: bool  # the bridge is what the template itself writes there, if it is append-only


def probe(renderer: ChatRenderer) -> list[ShapeReport]:
    """Return what a model's template does with each of `SHAPES`."""
    return [_report(renderer, shape, *parts) for shape, parts in SHAPES.items()]


def _report(
    renderer: ChatRenderer, shape: str, answer: Message, new: tuple[Message, ...], uses_tools: bool
) -> ShapeReport:
    tools: Sequence[Any] = _TOOLS if uses_tools else ()
    try:
        shorter = renderer.text([_USER, answer], tools, generate=False)
        longer = renderer.text([_USER, answer, *new], tools)
    except MalformedData:
        return ShapeReport(shape, renders=False, append_only=False, has_bridge=False, same_bridge=False)
    bridge = renderer.bridge(answer, AnswerEnd(), new, tools, has_system=False)
    append_only = longer.startswith(shorter)
    same = False
    if bridge is not None and append_only:
        written = renderer.text_of(bridge.rendered.token_ids)
        same = longer.endswith(written) and len(longer) - len(written) <= len(shorter)
    return ShapeReport(shape, True, append_only, bridge is not None, same)


def format_table(reports: Sequence[ShapeReport]) -> str:
    """Return the reports as a table for a terminal."""
    width = max(len(report.shape) for report in reports)
    lines = [f"{'shape':{width}}  append-only  continued by"]
    for report in reports:
        if not report.renders:
            lines.append(f"{report.shape:{width}}  refused      -")
            continue
        how = "a bridge" if report.has_bridge else "rendering again: a row for each"
        how += ", as the template writes it" if report.same_bridge else ""
        lines.append(f"{report.shape:{width}}  {'yes' if report.append_only else 'no':11}  {how}")
    return "\n".join(lines)


def shows_tools(renderer: ChatRenderer) -> bool:
    """Return True if the template shows the tools of a request; otherwise the policy does not know them."""
    try:
        return renderer.text([_USER], _TOOLS) != renderer.text([_USER], ())
    except MalformedData:
        return False
