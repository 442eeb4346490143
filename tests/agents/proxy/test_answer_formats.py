"""What each answer format reads as a tool call, and what stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS, split_reasoning
from penstock.agents.proxy.messages import Message, ToolCall, similar_arguments
from penstock.agents.proxy.tree import is_copy

HERMES, LLAMA, PLAIN = (ANSWER_FORMATS.find(name).value for name in ("hermes", "llama", "plain"))
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SECTION, KIMI_SECTION = "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>"
KIMI_CALL = "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>"


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
        '{"name": 5}',
        "[]",
        '{"name": ""}',
        '{"name": "a", "id": "b"}',
        '{"name": "a", "args": {"x": 1}}',
        '{"name": "a", "arguments": null}',
        '{"name": "a", "arguments": {}, "parameters": {"x": 1}}',
        '{"name": "a", "arguments": "x"}',
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": {"x": 1e999}}',
        '{"name": "a", "arguments": {"x": "\\ud800"}}',
        "[" * 100_000,
    ],
)
def test_an_invalid_call_stays_text(text: str) -> None:
    whole = f"<tool_call>{text}</tool_call>"
    parsed = HERMES.parse(whole)
    assert (parsed.content, parsed.calls, parsed.num_unparsed) == (whole, (), 1)


def test_llama_reads_an_answer_that_is_all_calls() -> None:
    one, other = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b", "arguments": {}}'
    assert calls(one, "llama") == [("a", {"x": 1})]
    assert calls(f"<|python_tag|>{one}; {other}", "llama") == [("a", {"x": 1}), ("b", {})]
    for text in (
        f"I call {one}",
        '{"x": 1}',
        f"{one} and more",
        "<|python_tag|>print(1)",
        one.replace("1", "1e999"),
        one.replace("1", '"\\ud800"'),
    ):
        assert LLAMA.parse(text).content == text
        assert LLAMA.parse(text).calls == ()


@pytest.mark.parametrize(
    ("form", "text", "content", "expected"),
    [
        ("mistral", 'Hm. [TOOL_CALLS] [{"name": "a", "arguments": {"x": "é"}}, {"name": "b", "arguments": {}}]', "Hm.", [("a", {"x": "é"}), ("b", {})]),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', "", [("a", {"x": 1}), ("b", {})]),
        (
            "deepseek",
            f'Hm.{DEEPSEEK_SECTION}{BEGIN}function{SEP}a\n```json\n{{"x": 1}}\n```{END}\n{BEGIN}function{SEP}b\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>',
            "Hm.", [("a", {"x": 1}), ("b", {})],
        ),
        ("deepseek", f'{DEEPSEEK_SECTION}{BEGIN}function{SEP}a\n```json\n{{"x": "```py\\n1\\n```"}}\n```{END}', "", [("a", {"x": "```py\n1\n```"})]),
        ("deepseek", f'{DEEPSEEK_SECTION}{BEGIN}a{SEP}{{"x": 1}}{END}{BEGIN}b{SEP}{{}}{END}<｜tool▁calls▁end｜>', "", [("a", {"x": 1}), ("b", {})]),
        (
            "kimi_k2",
            f'Hm.{KIMI_SECTION}{KIMI_CALL}{{"x": 1}}<|tool_call_end|><|tool_call_begin|>b:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>',
            "Hm.", [("a", {"x": 1}), ("b", {})],
        ),
    ],
)  # fmt: skip
def test_each_family_writes_calls_in_its_own_way(
    form: str, text: str, content: str, expected: list[tuple[str, object]]
) -> None:
    assert calls(text, form) == expected
    assert ANSWER_FORMATS.find(form).value.parse(text).content == content


def test_a_kimi_call_keeps_the_id_that_is_among_its_tokens() -> None:
    parsed = ANSWER_FORMATS.find("kimi_k2").value.parse(f"{KIMI_SECTION}{KIMI_CALL}{{}}<|tool_call_end|>")
    assert [call.id for call in parsed.calls] == ["functions.a:0"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", "[TOOL_CALLS] nothing"), ("mistral", "[TOOL_CALLS] []"), ("mistral", "[TOOL_CALLS]a[ARGS]{"), ("mistral", '[TOOL_CALLS] [{"name": "a"}, 3]'),
        ("mistral", "[TOOL_CALLS][ARGS]{}"), ("deepseek", DEEPSEEK_SECTION), ("deepseek", f"{DEEPSEEK_SECTION}{BEGIN}a{SEP}[]{END}"),
        ("deepseek", f"{DEEPSEEK_SECTION}{BEGIN}{SEP}{{}}{END}"), ("kimi_k2", f"{KIMI_SECTION}<|tool_call_begin|>a<|tool_call_argument_begin|>{{}}<|tool_call_end|>"),
        ("kimi_k2", f"{KIMI_SECTION}{KIMI_CALL}" + "[" * 100_000), ("kimi_k2", f"{KIMI_SECTION}{KIMI_CALL}"),
    ],
)  # fmt: skip
def test_calls_that_are_none_stay_text_in_every_family(form: str, text: str) -> None:
    parsed = ANSWER_FORMATS.find(form).value.parse(text)
    assert (parsed.content, parsed.calls, parsed.num_unparsed) == (text, (), 1)


def test_plain_reads_no_call() -> None:
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert (PLAIN.parse(text).content, PLAIN.parse(text).calls) == (text, ())


@given(st.text())
def test_no_text_makes_a_format_fail(text: str) -> None:
    for form in ANSWER_FORMATS.built_in.values():
        form.parse(text)
        for mark in (
            "<tool_call>",
            "[TOOL_CALLS]",
            "[TOOL_CALLS]a[ARGS]",
            f"{DEEPSEEK_SECTION}{BEGIN}a{SEP}",
            f"{KIMI_SECTION}{KIMI_CALL}",
        ):
            form.parse(f"{mark}{text}</tool_call>")
    split_reasoning(text, opened=True)


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


def test_true_is_not_one() -> None:
    sent = Message("assistant", tool_calls=(ToolCall("c", "look", '{"x": true}'),))
    received = Message("assistant", tool_calls=(ToolCall("c", "look", '{"x": 1}'),))
    assert not is_copy(sent, received, "json")
