"""Tool calls that models write as JSON: between tags, in a list, behind marks, or as the whole answer; and answers without any."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    Marks,
    ParsedAnswer,
    call_of,
    calls_between,
    finite,
    marked_calls,
    read_call,
    read_json,
    refuse_constant,
)

_HERMES_CALL = re.compile(  # a tag in a text of the JSON ends nothing; one without JSON behind it is a mention
    r'<tool_call>(?=\s*+[\[{])((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/?tool_call>))*+)(?:</tool_call>|(?=<tool_call>)|$)|<tool_call>',
    re.DOTALL,
)


class Hermes(AnswerFormat):
    """Tool calls as JSON between tags, as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

    name = "hermes"

    def parse(self, text: str) -> ParsedAnswer:
        return calls_between(_HERMES_CALL, text, lambda body: read_call(read_json(body)))


HERMES = Hermes()


_LLAMA_TAG = "<|python_tag|>"


class Llama(AnswerFormat):
    """Tool calls as Llama 3 writes them: the whole answer is ``{"name": …, "parameters": {…}}``, several joined by ``;``."""

    name = "llama"

    def parse(self, text: str) -> ParsedAnswer:
        begun = text.strip().startswith(_LLAMA_TAG)
        body = text.strip().removeprefix(_LLAMA_TAG).strip()
        if not begun and not body.startswith("{"):
            return ParsedAnswer(text)
        calls: list[Call] = []
        while body:
            value, body = _first_value(body)
            call = read_call(value)
            if call is None:
                return ParsedAnswer(text, num_unparsed=1)
            calls.append(call)
        return ParsedAnswer("", tuple(calls)) if calls else ParsedAnswer(text, num_unparsed=int(begun))


def _first_value(text: str) -> tuple[Any, str]:
    try:
        value, end = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite).raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:].lstrip().removeprefix(";").lstrip()


LLAMA = Llama()


_MISTRAL_BEGIN, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class Mistral(AnswerFormat):
    """Tool calls as Mistral writes them: ``[TOOL_CALLS]`` and a JSON list of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` for each."""

    name = "mistral"

    def parse(self, text: str) -> ParsedAnswer:
        before, begun, rest = text.partition(_MISTRAL_BEGIN)
        if not begun:
            return ParsedAnswer(text)
        try:
            calls = _named(rest) if _MISTRAL_ARGUMENTS in rest else _listed(rest)
        except ValueError:
            return ParsedAnswer(text, num_unparsed=1)
        return ParsedAnswer(before.strip(), calls)


def _listed(text: str) -> tuple[Call, ...]:
    values = read_json(text.strip())
    calls = [read_call(value) for value in values] if isinstance(values, list) else []
    valid_calls = tuple(call for call in calls if call is not None)
    if not valid_calls or len(valid_calls) < len(calls):
        raise ValueError("expected a list of calls")
    return valid_calls


def _named(text: str) -> tuple[Call, ...]:
    parts = (piece.partition(_MISTRAL_ARGUMENTS) for piece in text.split(_MISTRAL_BEGIN))
    return tuple(call_of(name, arguments) for name, _, arguments in parts)


MISTRAL = Mistral()


_DEEPSEEK_MARKS = Marks("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n?```\s*", re.DOTALL)  # to the last fence: a text in it may hold others


class DeepSeek(AnswerFormat):
    """Tool calls as DeepSeek writes them: a kind, a name and a fence of JSON (V3, R1), or a name and JSON (V3.1), between marks."""

    name = "deepseek"

    def parse(self, text: str) -> ParsedAnswer:
        return marked_calls(text, _DEEPSEEK_MARKS, _deepseek_call)


def _deepseek_call(text: str) -> Call:
    kind, _, rest = text.partition(_DEEPSEEK_SEPARATOR)
    fenced = _FENCE.search(rest)
    return call_of(kind, rest) if fenced is None else call_of(rest[: fenced.start()], fenced[1])


DEEPSEEK = DeepSeek()


_KIMI_MARKS = Marks("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+):([0-9]+)")


class KimiK2(AnswerFormat):
    """Tool calls as Kimi K2 writes them: ``functions.NAME:NUMBER`` and JSON, between marks.

    The id of a call is what the policy wrote, since the template repeats it before the tool's result.
    """

    name = "kimi_k2"

    def parse(self, text: str) -> ParsedAnswer:
        return marked_calls(text, _KIMI_MARKS, _kimi_call)


def _kimi_call(text: str) -> Call:
    call_id, _, arguments = text.partition(_KIMI_SEPARATOR)
    match = _KIMI_ID.fullmatch(call_id.strip())
    if match is None:
        raise ValueError("expected functions.NAME:NUMBER")
    return call_of(match[1], arguments, call_id.strip())


KIMI_K2 = KimiK2()


class Plain(AnswerFormat):
    """Answers without tool calls: all of the text is content."""

    name = "plain"

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text)


PLAIN = Plain()
