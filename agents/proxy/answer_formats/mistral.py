"""Tool calls as Mistral writes them: ``[TOOL_CALLS]`` and a JSON list of calls, or ``[TOOL_CALLS]name[ARGS]{…}`` for each."""

from __future__ import annotations

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    ParsedAnswer,
    call_of,
    read_call,
    read_json,
)

_BEGIN, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class Mistral(AnswerFormat):
    name = "mistral"

    def parse(self, text: str) -> ParsedAnswer:
        before, begun, rest = text.partition(_BEGIN)
        if not begun:
            return ParsedAnswer(text)
        try:
            calls = _named(rest) if _ARGUMENTS in rest else _listed(rest)
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
    parts = (piece.partition(_ARGUMENTS) for piece in text.split(_BEGIN))
    return tuple(call_of(name, arguments) for name, _, arguments in parts)


MISTRAL = Mistral()
