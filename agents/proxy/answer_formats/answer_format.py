"""What an answer format is: it reads tool calls out of an answer's text, outside the path of the tokens.

What a format finds changes only what the client sees; the sampled tokens are stored as they are. A call that does not
parse stays text. A new format is one file with an instance of `AnswerFormat` at its top level: in this package, in an
installed package with an entry point in the group ``penstock.answer_formats``, or in any file that
a run names.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.protocol.extensions import Registry

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object
    id: str = ""  # where it is part of the answer's tokens; empty: the client gets one of ours


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    content: str
    calls: tuple[Call, ...] = ()
    num_unparsed: int = 0  # calls that were begun and are not valid; they stay in ``content``


class AnswerFormat(ABC):
    """Reads the tool calls of one model family."""

    name: ClassVar[str]

    @abstractmethod
    def parse(self, text: str) -> ParsedAnswer:
        """Return what the text of an answer says; never raises. The reasoning has been split off.

        A format that needs the schemas of the tools takes a second parameter ``tools``, as the chat completions API writes them.
        """

    def parsed(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """Return what `parse` does, given the tools if it takes them."""
        takes_tools = "tools" in inspect.signature(self.parse).parameters
        return self.parse(text, **({"tools": tools} if takes_tools else {}))


ANSWER_FORMATS = Registry(
    "answer format",
    AnswerFormat,  # pyright: ignore[reportAbstractUsage]  (the class is only compared with)
    package="penstock.agents.proxy.answer_formats",
    group="penstock.answer_formats",
)


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str, bool]:
    """Return an answer's reasoning, what follows it, and whether the reasoning has no end.

    ``opened``: the prompt ends with the tag that begins the reasoning. Without a tag there is no reasoning.
    """
    begins = text.lstrip()
    if not opened and not begins.startswith(THINK):
        return "", text, False
    inside = text if opened and not begins.startswith(THINK) else begins[len(THINK) :]
    reasoning, end, rest = inside.partition(END_THINK)
    return reasoning.strip("\n"), rest.lstrip("\n"), not end


def read_call(value: Any) -> Call | None:
    """Return the call of a JSON object with ``name`` and one of ``arguments`` and ``parameters``; None: it is none.

    With a name alone, it has no arguments. With others under a key that is not read it is none: a tool would run without them.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    written = [value[key] for key in ("arguments", "parameters") if key in value] or [{}] * (len(value) == 1)
    try:
        return written_call(value["name"], written[0] if len(written) == 1 else None)
    except ValueError:
        return None


def read_json(text: str) -> Any:
    """Return a JSON value; raises ValueError for what is none, NaN and infinity included."""
    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class Marks:
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
        calls = tuple(read(piece.partition(marks.end)[0]) for piece in rest.split(marks.begin)[1:])
    except ValueError:
        return ParsedAnswer(text, num_unparsed=1)
    return ParsedAnswer(before.strip(), calls) if calls else ParsedAnswer(text, num_unparsed=1)


def calls_between(pattern: re.Pattern[str], text: str, read: Callable[[str], Call | None]) -> ParsedAnswer:
    """Return the calls at the matches of ``pattern``, whose first group is a call's inside, and the text around them.

    ``read`` raises ValueError, or returns None, for what is no call; that stays in the text, as does a match without the group.
    """
    calls: list[Call] = []
    kept: list[str] = []
    position = num_unparsed = 0
    for match in pattern.finditer(text):
        try:
            call = None if match[1] is None else read(match[1])
        except ValueError:
            call = None
        if call is None:
            num_unparsed += 1
            continue
        calls.append(call)
        kept.append(text[position : match.start()])
        position = match.end()
    content = "".join([*kept, text[position:]])
    return ParsedAnswer(content.strip() if calls else content, tuple(calls), num_unparsed)


def call_of(name: str, arguments: str, call_id: str = "") -> Call:
    return written_call(name.strip(), read_json(arguments.strip()), call_id)


def written_call(name: str, arguments: Any, call_id: str = "") -> Call:
    """Return a call; raises ValueError without a name and an object, and for half a surrogate pair, which no text can hold."""
    if not name or not isinstance(arguments, dict):
        raise ValueError("expected a name and an object")
    text = json.dumps(arguments, ensure_ascii=False)
    f"{name}{text}{call_id}".encode()
    return Call(name, text, call_id)
