"""Tool calls as Qwen3-Coder and Qwen3.5 write them: ``<tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>``.

The model may leave out the outer tags. Texts become values by the schemas of the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    ParsedAnswer,
    calls_between,
)
from penstock.agents.proxy.answer_formats.schema_values import typed_call

_CALL = re.compile(
    r"(?:<tool_call>\s*)?<function=(.*?)</function>(?:\s*</tool_call>)?|<tool_call>(?:\s*<function=)?|<function=",
    re.DOTALL,
)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


class QwenXml(AnswerFormat):
    name = "qwen_xml"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        return calls_between(_CALL, text, lambda body: _call(body, tools))


def _call(body: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    name, closed, rest = body.partition(">")
    if not closed or not name.strip() or "<" in name:
        raise ValueError("expected a name")
    texts: list[tuple[str, str]] = []
    position = 0
    while (match := _PARAMETER.match(rest, position)) is not None:
        value = match[2]
        if "<parameter=" in value:
            raise ValueError("a parameter has no end")
        texts.append((match[1], value.removeprefix("\n").removesuffix("\n")))
        position = match.end()
    if rest[position:].strip():
        raise ValueError("expected parameters alone")
    return typed_call(name.strip(), texts, tools)


QWEN_XML = QwenXml()
