"""Answers without tool calls: all of the text is content."""

from __future__ import annotations

from penstock.agents.proxy.answer_formats.answer_format import AnswerFormat, ParsedAnswer


class Plain(AnswerFormat):
    name = "plain"

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text)


PLAIN = Plain()
