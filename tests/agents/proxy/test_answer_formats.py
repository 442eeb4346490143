"""What each answer format reads as a tool call, and what stays text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agents.proxy.agent_model import TEMPLATES, bench
from tests.agents.proxy.conversation import Agent
from tests.deadline import ends_within

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS, split_reasoning
from penstock.agents.proxy.api import anthropic_messages, chat_completions, responses
from penstock.agents.proxy.messages import similar_arguments

HERMES, LLAMA, PLAIN = (ANSWER_FORMATS.find(name).value for name in ("hermes", "llama", "plain"))
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SECTION, KIMI_SECTION = "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>"
KIMI_CALL = "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>"
DEEPSEEK_END, KIMI_END = "<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>"
HARMONY_TO = "<|channel|>commentary to=functions."
QUOTE = '<|"|>'


def calls(text: str, form: str) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in ANSWER_FORMATS.find(form).value.parse(text).calls]


def test_hermes_reads_every_valid_call_and_leaves_the_others_in_the_text() -> None:
    good, bad = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', "<tool_call>{broken}</tool_call>"
    parsed = HERMES.parse(f"one {good} two {bad} three")
    assert [call.name for call in parsed.calls] == ["a"]
    assert parsed.content == f"one  two {bad} three"
    assert parsed.num_unparsed == 1
    assert calls('<tool_call>{"name": "list_files"}</tool_call>', "hermes") == [("list_files", {})]
    for key in ("arguments", "parameters"):
        assert calls(f'<tool_call>{{"name": "a", "{key}": {{"x": 1}}}}', "hermes") == [("a", {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": 5}', "[]", '{"name": ""}', '{"name": "a", "id": "b"}', '{"name": "a", "args": {"x": 1}}',
        '{"name": "a", "arguments": {}, "parameters": {"x": 1}}', '{"name": "a", "arguments": "x"}',
        '{"name": "a", "arguments": null}', '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": {"x": 1e999}}', '{"name": "a", "arguments": {"x": "\\ud800"}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_an_invalid_call_stays_text(text: str) -> None:
    whole = f"<tool_call>{text}</tool_call>"
    parsed = HERMES.parse(whole)
    assert (parsed.content, parsed.calls, parsed.num_unparsed) == (whole, (), 1)


def test_llama_reads_an_answer_that_is_all_calls() -> None:
    one, other = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b", "arguments": {}}'
    assert calls(f"<|python_tag|>{one}; {other}", "llama") == [("a", {"x": 1}), ("b", {})]
    assert calls("[a.b(x=[true, null, -1.5, (1,)])]", "llama") == [("a.b", {"x": [True, None, -1.5, [1]]})]
    texts = [f"I call {one}", '{"x": 1}', f"{one} and more", "<|python_tag|>print(1)", one.replace("1", "1e999")]
    texts += [one.replace("1", '"\\ud800"'), "[1, 2]", "[a](b)", "[a()] + [b()]", "[a(1)]", "[a(**b)]", "[a(x=y)]"]
    texts += ["[a(x={1})]", "[a()(x=1)]", "[a(x=1e999)]", "[a(x=1, x=2)]", "[a(" * 9999, "[a(), 1]"]
    for text in texts:
        assert LLAMA.parse(text).content == text
        assert LLAMA.parse(text).calls == ()


def _json(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _around(form: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: form.replace("NAME", name).replace("JSON", json.dumps(arguments))


def _tags(begin: str, argument: str, end: str) -> Callable[[str, dict[str, Any]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        texts = (argument.replace("KEY", key).replace("TEXT", _text(value)) for key, value in arguments.items())
        return f"{begin.replace('NAME', name)}{''.join(texts)}{end}"

    return one


def _python(text: Callable[[Any], str]) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: f"{name}({', '.join(f'{key}={text(one)}' for key, one in arguments.items())})"


def _dsml(name: str, arguments: dict[str, Any]) -> str:
    texts = (f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(one, str))}">{_text(one)}</｜DSML｜parameter>\n'
             for key, one in arguments.items())  # fmt: skip
    return f'<｜DSML｜invoke name="{name}">\n{"".join(texts)}</｜DSML｜invoke>\n'


def _gemma(quote: str) -> Callable[[Any], str]:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{text(one)}' for key, one in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(text, value))}]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    return text


# How each family writes one call, as the template of its models shows it; what stands before, between and behind calls.
WRITTEN: dict[str, tuple[Callable[[str, dict[str, Any]], str], str, str, str]] = {
    "hermes": (lambda n, a: f"<tool_call>\n{_json(n, a)}\n</tool_call>", "", "\n", ""),
    "granite": (lambda n, a: f"<tool_call>\n{_json(n, a)}\n</tool_call>", "", "\n", ""),
    "granite 3.0": (_json, "<|tool_call|>[", ", ", "]"),
    "granite 3.1": (_json, "<tool_call>[", ", ", "]"),
    "phi": (_json, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "phi one": (lambda n, a: f"<|tool_call|>{_json(n, a)}<|/tool_call|>", "", "", ""),
    "phi functools": (_json, "functools[", ", ", "]"),
    "nemotron": (_json, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "hunyuan": (_json, "<tool_calls>[", ", ", "]</tool_calls>"),
    "hunyuan lines": (_json, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "internlm": (lambda n, a: f"<|action_start|><|plugin|>\n{_json(n, a, 'parameters')}<|action_end|>", "", "\n", ""),
    "gemma": (lambda n, a: f"<|tool_call>call:{n}{_gemma(QUOTE)(a)}<tool_call|>", "", "", ""),
    "gemma function": (lambda n, a: f"<start_function_call>call:{n}{_gemma('<escape>')(a)}<end_function_call>", "", "\n", ""),
    "llama": (lambda n, a: _json(n, a, "parameters"), "", "; ", ""),
    "llama list": (lambda n, a: _json(n, a, "parameters"), "[", ", ", "]"),
    "llama tag": (lambda n, a: _json(n, a, "parameters"), "<|python_tag|>", "; ", ""),
    "llama 4": (lambda n, a: _json(n, a, "parameters"), "<|python_start|>I look.<|python_end|>", "", ""),
    "llama python": (_python(repr), "[", ", ", "]"),
    "llama 4 python": (_python(lambda one: _text([one])[1:-1]), "<|python_start|>[", ", ", "]<|python_end|>"),
    "mistral": (_json, "[TOOL_CALLS] [", ", ", "]"),
    "mistral named": (_around("[TOOL_CALLS]NAME[ARGS]JSON"), "", "", ""),
    "mistral id": (_around("[TOOL_CALLS]NAME[CALL_ID]abcdefgh1[ARGS]JSON"), "", "", ""),
    "mistral plain": (_around("[TOOL_CALLS]NAMEJSON"), "", "", ""),
    "deepseek": (_around(f"{BEGIN}function{SEP}NAME\n```json\nJSON\n```{END}"), DEEPSEEK_SECTION, "\n", DEEPSEEK_END),
    "deepseek 3.1": (_around(f"{BEGIN}NAME{SEP}JSON{END}"), DEEPSEEK_SECTION, "", DEEPSEEK_END),
    "deepseek 3.2": (_dsml, "\n\n<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>"),
    "deepseek 4": (_dsml, "\n\n<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>"),
    "kimi_k2": (_around(f"{KIMI_CALL.replace('.a:', '.NAME:')}JSON<|tool_call_end|>"), KIMI_SECTION, "", KIMI_END),
    "qwen_xml": (_tags("<function=NAME>\n", "<parameter=KEY>\nTEXT\n</parameter>\n", "</function>\n"),
                 "<tool_call>\n", "</tool_call>\n<tool_call>\n", "</tool_call>"),
    "seed_oss": (_tags("<function=NAME>\n", "<parameter=KEY>\nTEXT\n</parameter>\n", "</function>\n"),
                 "<seed:tool_call>\n", "", "</seed:tool_call>"),
    "minimax": (_tags('<invoke name="NAME">\n', '<parameter name="KEY">TEXT</parameter>\n', "</invoke>\n"),
                "\n<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    "glm": (_tags("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>TEXT</arg_value>\n", "</tool_call>"),
            "", "\n", ""),
    "harmony": (_around(f"<|start|>assistant{HARMONY_TO}NAME <|constrain|>json<|message|>JSON<|call|>"), "", "", ""),
    "harmony to": (_around(" to=functions.NAME<|channel|>commentary json<|message|>JSON<|call|>"),
                   "", "<|start|>assistant", ""),
}  # fmt: skip
HARMONY_THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
THOUGHT = {
    "gemma": "<|channel>thought\nhm<channel|>",
    "seed_oss": "<seed:think>hm</seed:think>",
    "mistral": "[THINK]hm[/THINK]",
    "harmony": HARMONY_THOUGHT,
}
LOOKED = {
    "one": [("look", {"word": "sun"})],
    "none": [("look", {})],
    "several": [("look", {"word": "sun"}), ("gone", {"word": "moon"}), ("look", {"word": "<b>\n"})],
    "nested": [("look", {"map": {"a": [1, {"b": None}], "c": 'q"}]'}, "on": True, "x": 1.5}),
               ("look", {"word": "é 日本 🌙"})],
}  # fmt: skip


TYPES = {"word": "string", "map": "object", "on": "boolean", "x": "number"}
SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


def written(form: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    one, begin, between, end = WRITTEN[form]
    return begin + between.join(one(name, arguments) for name, arguments in calls) + end


@pytest.mark.parametrize("case", LOOKED)
@pytest.mark.parametrize("form", WRITTEN)
def test_each_family_writes_calls_in_its_own_way(form: str, case: str) -> None:
    """What is cut off gives the calls that are whole, and never another one; all else stays in the text."""
    kind, expected = ANSWER_FORMATS.find(form.split(maxsplit=1)[0]).value, LOOKED[case]
    text = written(form, expected)
    parsed = kind.parsed(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == expected
    assert (parsed.content, parsed.num_unparsed) == ("I look." if form == "llama 4" else "", 0)
    said = kind.parsed(f"I look. {text}", TOOLS)
    alone = form in ("llama", "llama list", "llama 4", "llama python")  # calls are the whole answer there
    assert ([call.name for call in said.calls], said.content) == (
        ([], f"I look. {text}") if alone else ([name for name, _ in expected], "I look.")
    )
    for end in range(len(text)):
        cut = kind.parsed(text[:end], TOOLS)
        assert [(call.name, json.loads(call.arguments)) for call in cut.calls] == expected[: len(cut.calls)]
        assert cut.calls or cut.content == text[:end]


@pytest.mark.parametrize("form", WRITTEN)
async def test_every_api_shows_the_calls_of_every_family(tmp_path: Path, form: str) -> None:
    """With thinking before, streamed too; where no tools were offered, the call is text."""
    name, text = form.split(maxsplit=1)[0], written(form, LOOKED["several"])
    thought = THOUGHT.get(name, "<think>\nhm\n</think>\n\n")
    one = bench(tmp_path, answer_format=name, script=[f"{thought}{text}<|im_end|>"] * 2, max_new_tokens=2000)
    agent = Agent(one, tools=TOOLS)
    turn = await agent.turn(agent.messages)
    assert (turn.answer.reasoning, [call.name for call in turn.answer.tool_calls]) == ("hm", ["look", "gone", "look"])
    calls = [(call.id, json.loads(call.arguments)) for call in turn.answer.tool_calls]
    assert len({call.id for call in turn.answer.tool_calls}) == 3 or form in ("kimi_k2", "mistral id")
    deltas = [json.loads(event.split(b"data: ")[1]) for event in chat_completions.events(turn, {}, "m", 0, "c")[:-1]]
    chunks = [call for delta in deltas for call in delta["choices"][0]["delta"].get("tool_calls", ())]
    assert [(call["id"], json.loads(call["function"]["arguments"])) for call in chunks] == calls
    items = [item for item in responses.reply(turn, "m", 0, "r")["output"] if item["type"] == "function_call"]
    assert [(item["call_id"], json.loads(item["arguments"])) for item in items] == calls
    blocks = [one for one in anthropic_messages.reply(turn, "m", 0, "a")["content"] if one["type"] == "tool_use"]
    assert [(block["id"], block["input"]) for block in blocks] == calls
    agent.tools = []
    plain = await agent.turn(agent.messages)
    assert (plain.answer.tool_calls, plain.answer.content.strip()) == ((), text.strip())


# As gpt-oss's: an answer ends with one stop token, a call with another.
HARMONY = (
    "{%- for message in messages %}{%- if message.tool_calls %}{%- if message.content %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '<|start|>assistant to=functions.' + call.name }}"
    "{{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|endoftext|>' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|im_end|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif message.role == 'tool' %}{%- if not messages[loop.index0 - 1].tool_calls %}"
    "{{- raise_exception('no call') }}{%- endif %}"
    "{{- '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# As Mistral's: ids of nine letters and digits alone.
MISTRAL = (
    "{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.tool_call_id }}"
    "{{- '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- message.content }}{%- for call in message.tool_calls or [] %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids of length 9') }}{%- endif %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endif %}{%- endfor %}"
)
TEMPLATES.update(harmony=HARMONY, mistral=MISTRAL)
WORD, STAR = '{"word": "sun"}', "[TOOL_RESULTS]{}[TOOL_CONTENT]star[/TOOL_RESULTS]"


@pytest.mark.parametrize(
    ("form", "call", "behind"),
    [
        ("harmony", f"{HARMONY_THOUGHT}<|start|>assistant{HARMONY_TO}look json<|message|>{WORD}<|endoftext|>",
         "<|start|>functions.look to=assistant<|channel|>commentary<|message|>star<|end|><|start|>assistant"),
        ("mistral", f"[THINK]hm[/THINK][TOOL_CALLS]look[ARGS]{WORD}<|im_end|>", STAR),
        ("mistral", f"[THINK]hm[/THINK][TOOL_CALLS]look[CALL_ID]abcdefgh1[ARGS]{WORD}<|im_end|>",
         STAR.format("abcdefgh1")),
    ],
)  # fmt: skip
async def test_a_call_and_its_result_are_one_row(tmp_path: Path, form: str, call: str, behind: str) -> None:
    agent = Agent(
        bench(tmp_path, form, answer_format=form, script=[call, "star<|im_end|>"], max_new_tokens=200), tools=TOOLS
    )
    answer = await agent.ask()
    answer.pop("reasoning_content")
    await agent.ask({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "star"})
    first, second = (agent.bench.engine.tokenizer.decode(ids) for ids in agent.bench.engine.prompts)
    assert second == first + call + behind.format(answer["tool_calls"][0]["id"])
    assert [len(row.spans) for row in agent.end().rows] == [2]


def test_a_kimi_call_keeps_the_id_that_is_among_its_tokens() -> None:
    parsed = ANSWER_FORMATS.find("kimi_k2").value.parse(f"{KIMI_SECTION}{KIMI_CALL}{{}}<|tool_call_end|>")
    assert [call.id for call in parsed.calls] == ["functions.a:0"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", "[TOOL_CALLS] nothing"), ("mistral", "[TOOL_CALLS] []"), ("mistral", "[TOOL_CALLS]a[ARGS]{"),
        ("mistral", '[TOOL_CALLS] [{"name": "a"}, 3]'), ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("deepseek", f"{BEGIN}a{SEP}{{}}{END}"), ("kimi_k2", f"{KIMI_CALL}{{}}<|tool_call_end|>"),
        ("llama", "I print.<|python_tag|>print(1)"), ("llama", "The mark <|python_start|> begins calls."),
        *(("deepseek", DEEPSEEK_SECTION + call) for call in ("", f"{BEGIN}a{SEP}[]{END}", f"{BEGIN}{SEP}{{}}{END}")),
        ("kimi_k2", f"{KIMI_SECTION}{KIMI_CALL.replace('functions.a:0', 'a')}{{}}<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:look{word:sun}<tool_call|>"), ("gemma", '<|tool_call>call:look{word:<|"|>a}<tool_call|>'),
        ("minimax", '<invoke name="look" id="1"></invoke>'), ("harmony", "to=functions.look<|message|>{"),
        ("harmony", "<|channel|>commentary to=python code<|message|>1<|call|>"), ("harmony", f"to=look<|message|>{WORD}"),
        ("deepseek", _dsml("look", {"word": "a"}).replace("true", "false")), ("llama", '{"name": "Bern", "people": 1}'),
        ("glm", "<tool_call>look<arg_key>word</arg_key><arg_value>a</arg_value></tool_call>b</arg_value></tool_call>"),
        ("qwen_xml", "<function=look>\n<parameter=word>\na</parameter></function>b\n</parameter>\n</function>"),
        ("minimax", '<invoke name="look"><parameter name="word">a</parameter></invoke>b</parameter></invoke>'),
        ("kimi_k2", f"{KIMI_SECTION}{KIMI_CALL}" + "[" * 100_000), ("kimi_k2", f"{KIMI_SECTION}{KIMI_CALL}"),
    ],
)  # fmt: skip
def test_calls_that_are_none_stay_text_in_every_family(form: str, text: str) -> None:
    parsed = ANSWER_FORMATS.find(form).value.parse(text)
    assert (parsed.content, parsed.calls, parsed.num_unparsed) == (text, (), 1)


def test_a_text_of_beginnings_takes_time_that_grows_with_its_length() -> None:
    """A program reads it while others wait: 32 KiB in which each word begins a call took minutes."""
    text = "to=functions.lookto=functions." * 1100
    with ends_within(20.0):
        assert ANSWER_FORMATS.find("harmony").value.parse(text).content == text


TYPED = {
    "type": "object",
    "$defs": {"Level": {"enum": [1, 2]}},
    "properties": {
        "text": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "on": {"type": "boolean"},
        "list": {"type": "array"}, "map": {"type": "object"}, "level": {"$ref": "#/$defs/Level"}, "free": {},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "enum": {"enum": ["5", "6"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "number"}]},
        "kinds": {"type": ["integer", "string"]},
    },
}  # fmt: skip
SET = [{"type": "function", "function": {"name": "set", "parameters": TYPED}}]
STAY_TEXT: dict[str, list[str]] = {
    "text": ["5", "null", '{"a": 1}', " a\n b "], "n": ["five", "true"], "x": ["NaN", "1e999"], "on": ["1"],
    "list": ["1, 2", "{'a': 1}", "[1e999]", "[" * 9999, "[b'a']"], "map": ["[1]", "{'a': {1}}", "dict(a=1)"],
    "kinds": ["a", "007"], "either": ["007", "1e3", "+7", "1.50"], "enum": ["5"], "free": ["5"], "unknown": ["5"],
}  # fmt: skip
BECOME: dict[str, dict[str, object]] = {
    "n": {"5": 5, "-5.0": -5, "007": 7, "None": None}, "x": {"1.5": 1.5, "2": 2}, "on": {"True": True, "false": False},
    "list": {"[1, null]": [1, None], "['a', True, None]": ["a", True, None], "('a',)": ["a"], "null": None},
    "map": {'{"a": 1}': {"a": 1}, "{'a': {'b': (1, 2)}}": {"a": {"b": [1, 2]}}},
    "maybe": {"null": None, "None": None, "7": 7}, "level": {"2": 2}, "kinds": {"7": 7}, "either": {"7": 7, "1.5": 1.5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *((key, text, text) for key, texts in STAY_TEXT.items() for text in texts),
        *((key, text, value) for key, values in BECOME.items() for text, value in values.items()),
    ],
)
@pytest.mark.parametrize("form", ["qwen_xml", "glm", "minimax"])
def test_values_have_the_types_of_the_tools_schema(form: str, key: str, text: str, value: object) -> None:
    parsed = ANSWER_FORMATS.find(form).value.parsed(f"I set it.\n{written(form, [('set', {key: text})])}", SET)
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert (parsed.content, calls, parsed.num_unparsed) == ("I set it.", [("set", {key: value})], 0)


NOW, SETS = "<tool_call>\n<function=now>\n</function>\n</tool_call>", "<tool_call>\n<function=set>\n<parameter=text>\na"
HERMES_NOW, GLM_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "<tool_call>now</tool_call>"
GLM_SET = "<tool_call>set<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "names", "unparsed"),
    [
        ("qwen_xml", NOW, ["now"], 0),
        ("qwen_xml", f"<function=now></function>{SETS[12:]}</parameter></function>", ["now", "set"], 0),
        ("qwen_xml", SETS + "</function></tool_call>", [], 1),
        ("qwen_xml", SETS, [], 1),
        ("qwen_xml", "<tool_call>\n<function=set>\nstray\n</function></tool_call>", [], 1),
        ("qwen_xml", "<function=set><parameter=text>a</parameter><parameter=text>b</parameter></function>", [], 1),
        ("qwen_xml", "<function=></function>", [], 1),
        ("qwen_xml", HERMES_NOW, [], 1),
        ("qwen_xml", NOW.replace("now", '"now"') + "<function='set'><parameter=\"text\">a</parameter></function>",
         ["now", "set"], 0),
        ("qwen_xml", f"`<tool_call>` and `<function=set>` are tags.\n{NOW}", ["now"], 2),
        ("qwen_xml", f"{SETS}\n{NOW}", ["now"], 1),
        ("qwen_xml", f"{SETS}</parameter>\n<b/></parameter>\n</function>", ["set"], 0),
        ("llama", '{"answer": 42}', [], 0),
        ("qwen_xml", "<function=set><parameter=text>a <function=now></function> b</parameter></function>", ["set"], 0),
        ("qwen_xml", "<function=set><parameter=text>a <function=now></function> b", [], 1),
        ("hermes", f"Between `<tool_call>` tags: {HERMES_NOW}", ["now"], 1),
        ("hermes", f'<tool_call>{{"name": "set", {HERMES_NOW}', ["now"], 1),
        ("hermes", '<tool_call>{"name": "set", "arguments": {"text": "<tool_call>{}</tool_call> \\" x"}}</tool_call>',
         ["set"], 0),
        ("hermes", '<tool_call>{"name": "set", "arguments": {"text": "<tool_call>{', [], 2),
        ("glm", f"Between `<tool_call>` tags: {GLM_NOW}", ["now"], 1),
        ("glm", GLM_SET.format("text", f"a {GLM_NOW} b"), ["set"], 0),
        ("glm", GLM_NOW + GLM_SET.format("n", 1), ["now", "set"], 0),
        ("glm", "<tool_call>set<arg_key>n</arg_key></tool_call>", [], 1),
        ("glm", "<tool_call>set\n<arg_key>n</arg_key><arg_value>1", [], 1),
        ("glm", '<tool_call>{"name": "set"}</tool_call>', [], 1),
        ("glm", "<tool_call></tool_call>", [], 1),
    ],
)  # fmt: skip
def test_a_mention_a_beginning_or_a_call_in_a_text_is_no_call(
    form: str, text: str, names: list[str], unparsed: int
) -> None:
    parsed = ANSWER_FORMATS.find(form).value.parsed(text, SET)
    assert ([call.name for call in parsed.calls], parsed.num_unparsed) == (names, unparsed)
    assert names or parsed.content == text


def test_plain_reads_no_call() -> None:
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert (PLAIN.parse(text).content, PLAIN.parse(text).calls) == (text, ())


@given(st.text())
def test_no_text_makes_a_format_fail(text: str) -> None:
    for form in WRITTEN:
        kind, whole = ANSWER_FORMATS.find(form.split(maxsplit=1)[0]).value, written(form, LOOKED["one"])
        for one in (text, *(f"{whole[:end]}{text}{whole[end:]}" for end in range(0, len(whole), 7))):
            kind.parsed(kind.split(one, opened=True)[1], TOOLS)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("yes", False, ("", "yes", False)),
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes", False)),
        ("hm\n</think>\n\nyes", True, ("hm", "yes", False)),
        ("<think>hm", False, ("hm", "", True)),
        ("yes <think>hm</think>", False, ("", "yes <think>hm</think>", False)),
    ],
)
def test_the_reasoning_is_split_off(text: str, opened: bool, expected: tuple[str, str, bool]) -> None:
    assert split_reasoning(text, opened=opened) == expected


def test_only_scalars_in_another_form_are_similar() -> None:
    assert similar_arguments('{"a": false, "b": 1}', '{"a": "False", "b": "1.0"}')
    assert not similar_arguments('{"a": false}', '{"a": 0}')
    assert not similar_arguments('{"a": "x"}', '{"a": "y"}')
