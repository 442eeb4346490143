"""What an answer format is: it reads tool calls out of an answer's text, outside the path of the tokens.

What a format finds changes only what the client sees; the sampled tokens are stored as they are. A call that does not
parse stays text. A new format is one file with an instance of `AnswerFormat` at its top level: in this package, in an
installed package with an entry point in the group ``penstock.answer_formats``, or in any file that
a run names.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
import secrets
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

    name: str
    reasoning_tags: ClassVar[tuple[str, str]] = (THINK, END_THINK)

    @abstractmethod
    def parse(self, text: str) -> ParsedAnswer:
        """Return what the text of an answer says; never raises. The reasoning has been split off.

        A format that needs the schemas of the tools takes a second parameter ``tools``, as the chat completions API writes them.
        """

    def parsed(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
        """Return what `parse` does, given the tools if it takes them."""
        takes_tools = "tools" in inspect.signature(self.parse).parameters
        return self.parse(text, **({"tools": tools} if takes_tools else {}))

    def split(self, text: str, *, opened: bool) -> tuple[str, str, bool]:
        """Return an answer's reasoning, what follows it, and whether the next prompt has to close it; ``opened``: this one begins it."""
        reasoning, rest, is_open = split_reasoning(text, opened=opened, tags=self.reasoning_tags)
        return reasoning, rest, is_open and self.reasoning_tags[1] == END_THINK  # the one that `renderer` writes

    def new_call_id(self) -> str:
        """Return the id of a call whose tokens hold none, in a form that the family's chat template takes."""
        return f"call_{secrets.token_hex(12)}"


ANSWER_FORMATS = Registry(
    "answer format",
    AnswerFormat,  # pyright: ignore[reportAbstractUsage]  (the class is only compared with)
    package="penstock.agents.proxy.answer_formats",
    group="penstock.answer_formats",
)


def split_reasoning(text: str, *, opened: bool, tags: tuple[str, str] = (THINK, END_THINK)) -> tuple[str, str, bool]:
    """Return an answer's reasoning, what follows it, and whether the reasoning has no end.

    ``opened``: the prompt ends with the tag that begins the reasoning. Without a tag there is no reasoning.
    """
    begin, close = tags
    begins = text.lstrip()
    if not opened and not begins.startswith(begin):
        return "", text, False
    inside = text if opened and not begins.startswith(begin) else begins[len(begin) :]
    reasoning, end, rest = inside.partition(close)
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
        return ParsedAnswer(text, num_unparsed=int(marks.begin in text))
    try:
        calls = tuple(read(piece.partition(marks.end)[0]) for piece in rest.split(marks.begin)[1:])
    except ValueError:
        return ParsedAnswer(text, num_unparsed=1)
    return ParsedAnswer(before.strip(), calls) if calls else ParsedAnswer(text, num_unparsed=1)


def _gathered(
    text: str, begin: re.Pattern[str], read: Callable[[re.Match[str]], tuple[int, Sequence[Call]]]
) -> ParsedAnswer:
    """Return the calls that ``read`` finds at the matches of ``begin``, with the place behind them, and the text around them."""
    calls: list[Call] = []
    kept: list[str] = []
    position = num_unparsed = 0
    for match in begin.finditer(text):
        if match.start() < position:  # in a text of a call
            continue
        end, found = read(match)
        if not found:
            num_unparsed += 1
            continue
        calls += found
        kept.append(text[position : match.start()])
        position = end
    content = "".join([*kept, text[position:]])
    return ParsedAnswer(content.strip() if calls else content, tuple(calls), num_unparsed)


def calls_between(pattern: re.Pattern[str], text: str, read: Callable[[str], Call | None]) -> ParsedAnswer:
    """Return the calls at the matches of ``pattern``, whose first group is a call's inside, and the text around them.

    ``read`` raises ValueError, or returns None, for what is no call; that stays in the text, as does a match without the group.
    """

    def of(match: re.Match[str]) -> tuple[int, Sequence[Call]]:
        with contextlib.suppress(ValueError):
            if match[1] is not None and (call := read(match[1])) is not None:
                return match.end(), [call]
        return match.end(), ()

    return _gathered(text, pattern, of)


def decoded(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and its end; raises ValueError."""
    try:
        return json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite).raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def listed_calls(value: Any) -> tuple[Call, ...]:
    """Return the calls of a JSON list of them, or of one; raises ValueError if any is none."""
    calls = [read_call(one) for one in (value if isinstance(value, list) else [value])]
    valid_calls = tuple(call for call in calls if call is not None)
    if not valid_calls or len(valid_calls) < len(calls):
        raise ValueError("expected calls")
    return valid_calls


_NEXT_LINE = re.compile(r"\s*+(?=\{)")


def calls_behind(begin: re.Pattern[str], end: re.Pattern[str], text: str, *, in_lines: bool = False) -> ParsedAnswer:
    """Return the calls of the JSON values that stand behind marks, and the text around them; the mark of an end may be absent.

    ``in_lines``: more objects may follow the value.
    """

    def behind(match: re.Match[str]) -> tuple[int, Sequence[Call]]:
        try:
            value, stop = decoded(text, match.end())
            calls = listed_calls(value)
            while in_lines and (line := _NEXT_LINE.match(text, stop)):
                value, stop = decoded(text, line.end())
                calls += listed_calls(value)
            closed = end.match(text, stop)
            return stop if closed is None else closed.end(), calls
        except ValueError:
            return match.end(), ()

    return _gathered(text, begin, behind)


def call_of(name: str, arguments: str, call_id: str = "") -> Call:
    return written_call(name.strip(), read_json(arguments.strip()), call_id)


def written_call(name: str, arguments: Any, call_id: str = "") -> Call:
    """Return a call; raises ValueError without a name and an object, and for half a surrogate pair, which no text can hold."""
    if not name or not isinstance(arguments, dict):
        raise ValueError("expected a name and an object")
    text = json.dumps(arguments, ensure_ascii=False)
    f"{name}{text}{call_id}".encode()
    return Call(name, text, call_id)
