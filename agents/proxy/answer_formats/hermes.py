"""Tool calls as JSON between tags, as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

import re

from penstock.agents.proxy.answer_formats.answer_format import AnswerFormat, Call, ParsedAnswer, read_call, read_json

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class Hermes(AnswerFormat):
    name = "hermes"

    def parse(self, text: str) -> ParsedAnswer:
        calls: list[Call] = []
        kept: list[str] = []
        position = num_unparsed = 0
        for match in _CALL.finditer(text):
            try:
                call = read_call(read_json(match[1]))
            except ValueError:
                call = None
            if call is None:
                num_unparsed += 1
                continue
            calls.append(call)
            kept.append(text[position : match.start()])
            position = match.end()
        kept.append(text[position:])
        content = "".join(kept)
        return ParsedAnswer(content.strip() if calls else content, tuple(calls), num_unparsed)


HERMES = Hermes()
