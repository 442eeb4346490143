"""Tool calls as DeepSeek writes them: a kind, a name and a fence of JSON (V3, R1), or a name and JSON (V3.1), between marks."""

from __future__ import annotations

import re

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    Marks,
    ParsedAnswer,
    call_of,
    marked_calls,
)

_MARKS = Marks("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n?```\s*", re.DOTALL)  # to the last fence: a text in it may hold others


class DeepSeek(AnswerFormat):
    name = "deepseek"

    def parse(self, text: str) -> ParsedAnswer:
        return marked_calls(text, _MARKS, _call)


def _call(text: str) -> Call:
    kind, _, rest = text.partition(_SEPARATOR)
    fenced = _FENCE.search(rest)
    return call_of(kind, rest) if fenced is None else call_of(rest[: fenced.start()], fenced[1])


DEEPSEEK = DeepSeek()
