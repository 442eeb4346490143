"""Read calls of tools that stand between marks of their own, which are control tokens of the model. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from penstock.agents.proxy.answer_formats.answer_format import Call, ParsedAnswer, read_json


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one model family."""

    section: str  # before all calls
    begin: str
    end: str


def marked_calls(text: str, marks: Marks, read: Callable[[str], Call]) -> ParsedAnswer:
    """Return the calls behind the section's mark, and the text before it; one that is invalid leaves all of them in the text.

    ``read`` makes a call of what stands between its marks; it raises ValueError for what is none.
    """
    before, begun, rest = text.partition(marks.section)
    if not begun:
        return ParsedAnswer(text)
    try:
        calls = tuple(read(one.partition(marks.end)[0]) for one in rest.split(marks.begin)[1:])
    except ValueError:
        return ParsedAnswer(text, num_unparsed=1)
    return ParsedAnswer(before.strip(), calls) if calls else ParsedAnswer(text, num_unparsed=1)


def call_of(name: str, arguments: str, call_id: str = "") -> Call:
    """Return a call of a name and the JSON text of an object; raises ValueError for what is none."""
    value = read_json(arguments.strip())
    if not name.strip() or not isinstance(value, dict):
        raise ValueError("expected a name and an object")
    return Call(name.strip(), json.dumps(value, ensure_ascii=False), call_id)
