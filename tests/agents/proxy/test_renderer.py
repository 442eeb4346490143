"""Templates: the shapes that they continue without changing what stands before; prompts that are encoded once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.agents.proxy.agent_model import TEMPLATES, write_model

from penstock.agents.proxy import renderer
from penstock.agents.proxy.__main__ import main
from penstock.agents.proxy.messages import Message
from penstock.agents.proxy.renderer import SHAPES, ChatRenderer, Rendered, format_table, probe, shows_tools
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import MalformedData


def renderer_of(folder: Path, template: str) -> ChatRenderer:
    return ChatRenderer(ChatTokenizer.read(write_model(folder, TEMPLATES[template])))


@pytest.mark.parametrize(
    ("template", "not_append_only", "knows_tools"),
    [
        ("smollm2", set(), False),
        ("qwen25", set(), True),
        ("qwen3", set(SHAPES) - {"reasoning and call, then result"}, True),
        ("rewrites", set(), True),
    ],
)
def test_the_shapes_of_a_template(tmp_path: Path, template: str, not_append_only: set[str], knows_tools: bool) -> None:
    made = renderer_of(tmp_path, template)
    reports = probe(made)
    assert {report.shape for report in reports if not report.append_only} == not_append_only
    assert all(report.has_bridge for report in reports)
    assert all(report.same_bridge for report in reports if report.append_only)
    assert shows_tools(made) is knows_tools


def test_the_table_names_what_is_refused_and_what_has_no_bridge(tmp_path: Path) -> None:
    table = format_table(probe(renderer_of(tmp_path, "llama")))
    assert "two calls, then two results      refused" in table
    assert "answer, then user                yes" in table
    table = format_table(probe(renderer_of(tmp_path / "other", "repeats")))
    assert "rendering again: a row for each" in table


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model", TEMPLATES["qwen3"])
    assert main([str(folder)]) == 0
    assert "The template shows tools." in capsys.readouterr().out
    assert main([str(folder), "--require-append-only"]) == 1
    assert main([str(write_model(tmp_path / "other", TEMPLATES["qwen25"])), "--require-append-only"]) == 0
    assert main([str(tmp_path / "nothing")]) == 1
    assert "no such folder" in capsys.readouterr().err


class Counting(ChatTokenizer):
    """Notes what is encoded; waits while it is held, and refuses a text with the word refused."""

    encoded: list[str]
    may_go_on: threading.Event

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        assert self.may_go_on.wait(60)
        if "refused" in text:
            raise MalformedData("it is refused")
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def counted(tool_model: Path) -> tuple[ChatRenderer, Counting]:
    tokenizer = Counting.read(tool_model)
    tokenizer.encoded, tokenizer.may_go_on = [], threading.Event()
    tokenizer.may_go_on.set()
    made = ChatRenderer(tokenizer)
    tokenizer.encoded.clear()
    return made, tokenizer


def whole(made: ChatRenderer, text: str) -> Rendered:
    return made.whole([Message("user", text)], ())


def test_a_prompt_that_was_encoded_is_not_encoded_again(
    tool_model: Path, counted: tuple[ChatRenderer, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are those of a renderer that keeps nothing; the prompt that was used longest ago makes room."""
    made, tokenizer = counted
    monkeypatch.setattr(renderer, "_KEPT_CHARACTERS", 0)
    keeps_none = ChatRenderer(ChatTokenizer.read(tool_model))
    made._kept = renderer._KeptPrompts(3 * len(made.text([Message("user", "hello 0")], ())))
    for number in (0, 1, 2, 0, 3, 0, 2, 1):
        assert whole(made, f"hello {number}") == whole(keeps_none, f"hello {number}")
    assert [text.partition("hello ")[2][0] for text in tokenizer.encoded] == ["0", "1", "2", "3", "1"]
    assert keeps_none._kept._encoded == {}


def test_a_prompt_that_several_ask_for_at_once_is_encoded_once(counted: tuple[ChatRenderer, Counting]) -> None:
    made, tokenizer = counted
    tokenizer.may_go_on.clear()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(whole, made, "hello world") for _ in range(4)]
        tokenizer.may_go_on.set()
        found = [one.result(60) for one in asked]
    assert len(tokenizer.encoded) == 1
    assert all(one is found[0] for one in found)


def test_a_prompt_that_was_refused_is_asked_for_again(counted: tuple[ChatRenderer, Counting]) -> None:
    made, tokenizer = counted
    for _ in range(2):
        with pytest.raises(MalformedData, match="it is refused"):
            whole(made, "refused")
    assert len(tokenizer.encoded) == 2
    assert made._kept._characters == 0
