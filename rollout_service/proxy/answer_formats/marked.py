"""Tool calls between marks of their own, as DeepSeek and Kimi write them; the marks are control tokens of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from penstock.rollout_service.proxy.answer_formats.answer_format import AnswerFormat, Call, ParsedAnswer, read_json

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+):(\d+)")


class DeepSeek(AnswerFormat):
    """The answer format ``deepseek``: of V3 and R1 (arguments in a fence), and of V3.1 (arguments alone)."""

    name = "deepseek"

    def parse(self, text: str) -> ParsedAnswer:
        """Return the calls of the section, and the text before it."""
        return _section(text, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call)


class Kimi(AnswerFormat):
    """The answer format ``kimi_k2``; ids of calls are those that the policy wrote, since they are part of its tokens."""

    name = "kimi_k2"

    def parse(self, text: str) -> ParsedAnswer:
        """Return the calls of the section, and the text before it."""
        return _section(text, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", _kimi_call)


def _section(text: str, section: str, begin: str, end: str, read: Callable[[str], Call]) -> ParsedAnswer:
    """Return what a text says whose calls are between ``begin`` and ``end``, behind ``section``; one that is invalid leaves all in the text."""
    before, begun, rest = text.partition(section)
    if not begun:
        return ParsedAnswer(text)
    try:
        calls = tuple(read(one.partition(end)[0]) for one in rest.split(begin)[1:])
    except ValueError:
        return ParsedAnswer(text, num_unparsed=1)
    return ParsedAnswer(before.strip(), calls) if calls else ParsedAnswer(text, num_unparsed=1)


def _deepseek_call(text: str) -> Call:
    kind, _, rest = text.partition("<｜tool▁sep｜>")
    fenced = _FENCE.search(rest)
    name = rest[: fenced.start()] if fenced else kind
    return _call(name, fenced[1] if fenced else rest)


def _kimi_call(text: str) -> Call:
    call_id, _, arguments = text.partition("<|tool_call_argument_begin|>")
    found = _KIMI_ID.fullmatch(call_id.strip())
    if found is None:
        raise ValueError("expected functions.name:number")
    return _call(found[1], arguments, call_id.strip())


def _call(name: str, arguments: str, call_id: str = "") -> Call:
    value = read_json(arguments.strip())
    if not name.strip() or not isinstance(value, dict):
        raise ValueError("expected a name and an object")
    return Call(name.strip(), json.dumps(value, ensure_ascii=False), call_id)


DEEPSEEK = DeepSeek()
KIMI = Kimi()
