"""Tool calls as JSON between tags, as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

import re

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    ParsedAnswer,
    calls_between,
    read_call,
    read_json,
)

_CALL = re.compile(  # a tag in a text of the JSON ends nothing; one without JSON behind it is a mention
    r'<tool_call>(?=\s*+[\[{])((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/?tool_call>))*+)(?:</tool_call>|(?=<tool_call>)|$)|<tool_call>',
    re.DOTALL,
)


class Hermes(AnswerFormat):
    name = "hermes"

    def parse(self, text: str) -> ParsedAnswer:
        return calls_between(_CALL, text, lambda body: read_call(read_json(body)))


HERMES = Hermes()
