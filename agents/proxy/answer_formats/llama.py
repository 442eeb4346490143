"""Tool calls as Llama 3 writes them: the whole answer is ``{"name": …, "parameters": {…}}``, several joined by ``;``."""

from __future__ import annotations

import json
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    ParsedAnswer,
    finite,
    read_call,
    refuse_constant,
)

_TAG = "<|python_tag|>"


class Llama(AnswerFormat):
    name = "llama"

    def parse(self, text: str) -> ParsedAnswer:
        begun = text.strip().startswith(_TAG)
        body = text.strip().removeprefix(_TAG).strip()
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
