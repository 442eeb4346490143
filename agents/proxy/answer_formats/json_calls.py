"""Tool calls that models write as JSON: between tags, in a list, behind marks, or as the whole answer; and answers without any."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    Marks,
    ParsedAnswer,
    call_of,
    calls_behind,
    calls_between,
    decoded,
    listed_calls,
    marked_calls,
    read_call,
    read_json,
    written_call,
)
from penstock.agents.proxy.answer_formats.typed_calls import MiniMax

_HERMES_CALL = re.compile(  # a tag in a text of the JSON ends nothing; one without JSON behind it is a mention
    r'<tool_call>(?=\s*+[\[{])((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/?tool_call>))*+)(?:</tool_call>|(?=<tool_call>)|$)|<tool_call>',
    re.DOTALL,
)


class Hermes(AnswerFormat):
    """Tool calls as JSON between tags, as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

    name = "hermes"

    def parse(self, text: str) -> ParsedAnswer:
        return calls_between(_HERMES_CALL, text, lambda body: read_call(read_json(body)))


HERMES = Hermes()


class BehindMark(AnswerFormat):
    """Tool calls as JSON behind a mark, a list of them or one, or ``in_lines``; the mark of their end may be absent."""

    def __init__(self, name: str, begin: str, end: str, *, in_lines: bool = False) -> None:
        self.name, self._in_lines = name, in_lines
        self._begin, self._end = re.compile(rf"(?:{begin})\s*+"), re.compile(rf"\s*+(?:{end})")

    def parse(self, text: str) -> ParsedAnswer:
        return calls_behind(self._begin, self._end, text, in_lines=self._in_lines)


GRANITE = BehindMark("granite", r"<\|?tool_call\|?>", "</tool_call>")  # 3.0; 3.1 to 3.3; as Hermes (4)
PHI = BehindMark("phi", r"<\|tool_call\|>|\bfunctools(?=\s*+\[)", r"<\|/tool_call\|>")  # Phi-4-mini
NEMOTRON = BehindMark("nemotron", "<TOOLCALL>", "</TOOLCALL>")  # Nano 2; 3 writes as Qwen3-Coder does
HUNYUAN = BehindMark("hunyuan", "<tool_calls>", "</tool_calls>", in_lines=True)  # A13B, Jamba; MiniMax-M1 in lines
INTERNLM = BehindMark("internlm", r"<\|action_start\|>\s*+<\|plugin\|>", r"<\|action_end\|>")


_GEMMA_BEGIN, _GEMMA_QUOTE = r"<(?:\|tool_call|start_function_call)>", r"(?:<\|\"\|>|<escape>)"
_GEMMA_CALL = re.compile(
    rf"{_GEMMA_BEGIN}\s*+call:((?:[^<]++|{_GEMMA_QUOTE}.*?{_GEMMA_QUOTE}|<(?!tool_call\||end_function_call))*+)"
    rf"(?:<tool_call\|>|<end_function_call>)|{_GEMMA_BEGIN}",
    re.DOTALL,
)
_GEMMA_KEY = re.compile(r"([{,]\s*+)([^\s\"{}\[\],:]++)\s*+:")


class Gemma(AnswerFormat):
    """Tool calls as Gemma 4 and FunctionGemma write them: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1]}<tool_call|>``."""

    name = "gemma"
    reasoning_tags = ("<|channel>thought", "<channel|>")

    def parse(self, text: str) -> ParsedAnswer:
        return calls_between(_GEMMA_CALL, text, _gemma_call)


def _gemma_call(text: str) -> Call:
    name, begun, rest = text.partition("{")
    pieces = re.split(_GEMMA_QUOTE, begun + rest)  # every second one is a text
    written = (json.dumps(one) if n % 2 else _GEMMA_KEY.sub(r'\1"\2":', one) for n, one in enumerate(pieces))
    return call_of(name, "".join(written))


GEMMA = Gemma()


_MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\s*+([^\s\[\]{}]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*+(?=\{)")
_MISTRAL_NEXT = re.compile(r"\s*+(?:\[TOOL_CALLS\](?=.)|\Z)", re.DOTALL)


class Mistral(AnswerFormat):
    """Tool calls as Mistral writes them: ``[TOOL_CALLS]`` and a JSON list, or ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`` for each.

    The id of a call is what the policy wrote, if it did: the template repeats it. It takes ids of nine letters and digits alone.
    """

    name = "mistral"
    reasoning_tags = ("[THINK]", "[/THINK]")

    def parse(self, text: str) -> ParsedAnswer:
        before, begun, rest = text.partition(_MISTRAL_BEGIN)
        if not begun:
            return ParsedAnswer(text)
        try:
            calls = _listed(rest) if rest.lstrip().startswith("[") else _named(rest)
        except ValueError:
            return ParsedAnswer(text, num_unparsed=1)
        return ParsedAnswer(before.strip(), calls)

    def new_call_id(self) -> str:
        return secrets.token_hex(5)[:9]


def _listed(text: str) -> tuple[Call, ...]:
    values = read_json(text.strip())
    calls = listed_calls(values)
    return tuple(replace(call, id=_written_id(value)) for call, value in zip(calls, values, strict=True))


def _written_id(value: dict[str, object]) -> str:
    written = value.get("id")
    return written if isinstance(written, str) and re.fullmatch("[A-Za-z0-9]{9}", written) else ""


def _named(text: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    at = 0
    while at < len(text) or not calls:
        head = _MISTRAL_HEAD.match(text, at)
        value, end = (None, at) if head is None else decoded(text, head.end())
        following = _MISTRAL_NEXT.match(text, end)
        if head is None or following is None:
            raise ValueError("expected a name and an object")
        calls.append(written_call(head[1], value, _written_id({"id": head[2]})))
        at = following.end()
    return tuple(calls)


MISTRAL = Mistral()


_DEEPSEEK_MARKS = Marks("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n?```\s*", re.DOTALL)  # to the last fence: a text in it may hold others


class DeepSeek(MiniMax):
    """Tool calls as DeepSeek writes them: a kind, a name and a fence of JSON (V3, R1), or a name and JSON (V3.1), between marks.

    V3.2 and V4 write tags: ``<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>…``.
    """

    name = "deepseek"
    tags = ("｜DSML｜(?:function|tool)_calls", "｜DSML｜invoke name=", "｜DSML｜parameter name=")

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        if _DEEPSEEK_MARKS.begin in text or _DEEPSEEK_MARKS.section in text:
            return marked_calls(text, _DEEPSEEK_MARKS, _deepseek_call)
        return super().parse(text, tools)


def _deepseek_call(text: str) -> Call:
    kind, _, rest = text.partition(_DEEPSEEK_SEPARATOR)
    fenced = _FENCE.search(rest)
    return call_of(kind, rest) if fenced is None else call_of(rest[: fenced.start()], fenced[1])


DEEPSEEK = DeepSeek()


_KIMI_MARKS = Marks("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+):([0-9]+)")


class KimiK2(AnswerFormat):
    """Tool calls as Kimi K2 writes them: ``functions.NAME:NUMBER`` and JSON, between marks.

    The id of a call is what the policy wrote, since the template repeats it before the tool's result.
    """

    name = "kimi_k2"

    def parse(self, text: str) -> ParsedAnswer:
        return marked_calls(text, _KIMI_MARKS, _kimi_call)


def _kimi_call(text: str) -> Call:
    call_id, _, arguments = text.partition(_KIMI_SEPARATOR)
    match = _KIMI_ID.fullmatch(call_id.strip())
    if match is None:
        raise ValueError("expected functions.NAME:NUMBER")
    return call_of(match[1], arguments, call_id.strip())


KIMI_K2 = KimiK2()


_HARMONY_BODY = r"<\|message\|>(?:[^<]++|<(?!\|(?:start|end|call|return)\|>))*+"
_HARMONY_END = r"(?:<\|(?:end|call|return)\|>)?"
_HARMONY_CALL = re.compile(
    r"(?:<\|start\|>\w*\s*)?(?:<\|channel\|>\w*\s*)?\bto=("
    rf"[^\s<]{{1,99}}+(?:[^<]|<\|c(?:hannel|onstrain)\|>){{0,99}}+{_HARMONY_BODY}){_HARMONY_END}"  # bounded: the time is that of the text
)
_HARMONY_MESSAGE = re.compile(
    rf"{_HARMONY_CALL.pattern}|(?:<\|start\|>\w*\s*)?<\|channel\|>(\w+)(?:[^<]|<\|constrain\|>){{0,99}}({_HARMONY_BODY}){_HARMONY_END}"
)


class Harmony(AnswerFormat):
    """Answers of gpt-oss: messages of channels, of which ``analysis`` is the reasoning, and calls as JSON to ``functions.NAME``."""

    name = "harmony"

    def split(self, text: str, *, opened: bool) -> tuple[str, str, bool]:
        del opened
        reasoning: list[str] = []
        rest: list[str] = []
        position = 0
        for match in _HARMONY_MESSAGE.finditer(text):
            call, channel, said = match.groups()
            rest.append(text[position : match.start()])
            position = match.end()
            if call is not None:
                rest.append(match[0])
            elif channel == "analysis":
                reasoning.append(said.removeprefix("<|message|>"))
            else:
                rest.append("\n" * any(rest) + said.removeprefix("<|message|>"))
        rest.append(text[position:])
        return "\n".join(reasoning), "".join(rest), False

    def parse(self, text: str) -> ParsedAnswer:
        return calls_between(_HARMONY_CALL, text, _harmony_call)


def _harmony_call(text: str) -> Call:
    head, _, arguments = text.partition("<|message|>")
    recipient = re.split(r"\s|<", head, maxsplit=1)[0]
    if not recipient.startswith("functions."):  # a tool of its training: browser, python
        raise ValueError("expected functions.NAME")
    return call_of(recipient.removeprefix("functions."), arguments)


HARMONY = Harmony()


class Plain(AnswerFormat):
    """Answers without tool calls: all of the text is content."""

    name = "plain"

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text)


PLAIN = Plain()
