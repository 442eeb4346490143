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
from penstock.agents.proxy.answer_formats.schema_values import typed_call, written_arguments

_CALL = re.compile(  # a call; one that was begun, up to its end or the next; a mention
    r"(?:<tool_call>\s*+)?<function=([^<>]*+>(?:\s*+<parameter=[^>\s]+>(?:(?!<parameter=).)*?</parameter>)*+\s*+)</function>(?:\s*+</tool_call>)?"
    r"|(?:<tool_call>\s*+)?<function=[^<>]*+>\s*+<parameter=.*?(?:</function>|(?=<tool_call>)|$)"
    r"|<tool_call>(?:\s*+<function=)?|<function=",
    re.DOTALL,
)
_QUOTED = re.compile(r"\s*([\"']?)(.*?)\1\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


class QwenXml(AnswerFormat):
    name = "qwen_xml"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        return calls_between(_CALL, text, lambda body: _call(body, tools))


def _call(body: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    name, closed, rest = body.partition(">")
    if not closed or not _name(name) or "<" in name:
        raise ValueError("expected a name")
    arguments = [
        (_name(key), text.removeprefix("\n").removesuffix("\n"))
        for key, text in written_arguments(_PARAMETER, rest, ("<parameter=",))
    ]
    return typed_call(_name(name), arguments, tools)


def _name(text: str) -> str:
    """Return a name without the quotes that a model may write around it, as XML has them."""
    match = _QUOTED.fullmatch(text)
    return match[2] if match else text


QWEN_XML = QwenXml()
