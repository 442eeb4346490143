"""Tool calls as GLM-4.5 to 4.7 write them: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>TEXT</arg_value></tool_call>``.

Texts become values by the schemas of the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import AnswerFormat, Call, ParsedAnswer, calls_between
from penstock.agents.proxy.answer_formats.schema_values import typed_call, written_arguments

_CALL = re.compile(  # a call; one that was begun, up to its end or the next; a mention
    r"<tool_call>(\s*+[^\s<>{}]++\s*+(?:<arg_key>(?:(?!<arg_key>).)*?</arg_key>\s*+<arg_value>(?:(?!<arg_value>).)*?</arg_value>\s*+)*+)</tool_call>"
    r"|<tool_call>[^<]*+<arg_key>.*?(?:</tool_call>|(?=<tool_call>)|$)|<tool_call>",
    re.DOTALL,
)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Glm(AnswerFormat):
    name = "glm"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        return calls_between(_CALL, text, lambda body: _call(body, tools))


def _call(body: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    name, begun, rest = body.partition("<arg_key>")
    if not name.strip() or re.search(r"[\s<>{}]", name.strip()):
        raise ValueError("expected a name")
    arguments = written_arguments(_ARGUMENT, begun + rest, ("<arg_key>", "<arg_value>"))
    return typed_call(name.strip(), [(key.strip(), text) for key, text in arguments], tools)


GLM = Glm()
