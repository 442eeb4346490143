"""Tool calls as Kimi K2 writes them: ``functions.NAME:NUMBER`` and JSON, between marks.

The id of a call is what the policy wrote, since the template repeats it before the tool's result.
"""

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

_MARKS = Marks("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>")
_SEPARATOR = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?([^\s:]+):([0-9]+)")


class KimiK2(AnswerFormat):
    name = "kimi_k2"

    def parse(self, text: str) -> ParsedAnswer:
        return marked_calls(text, _MARKS, _call)


def _call(text: str) -> Call:
    call_id, _, arguments = text.partition(_SEPARATOR)
    match = _ID.fullmatch(call_id.strip())
    if match is None:
        raise ValueError("expected functions.NAME:NUMBER")
    return call_of(match[1], arguments, call_id.strip())


KIMI_K2 = KimiK2()
