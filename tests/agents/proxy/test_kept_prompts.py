"""Prompts that episodes share are encoded once, and those that were used last are kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.agents.proxy.agent_model import QWEN25, write_model

from penstock.agents.proxy import renderer
from penstock.agents.proxy.messages import Message
from penstock.agents.proxy.renderer import ChatRenderer, Rendered
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import MalformedData


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), QWEN25)


@pytest.fixture
def counted(model: Path) -> tuple[ChatRenderer, Counting]:
    tokenizer = Counting.read(model)
    tokenizer.encoded, tokenizer.may_go_on = [], threading.Event()
    tokenizer.may_go_on.set()
    made = ChatRenderer(tokenizer)
    tokenizer.encoded.clear()
    return made, tokenizer


def whole(made: ChatRenderer, text: str) -> Rendered:
    return made.whole([Message("user", text)], ())


def test_a_prompt_that_was_encoded_is_not_encoded_again(
    model: Path, counted: tuple[ChatRenderer, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are those of a renderer that keeps nothing; the prompt that was used longest ago makes room."""
    made, tokenizer = counted
    monkeypatch.setattr(renderer, "_KEPT_CHARACTERS", 0)
    keeps_none = ChatRenderer(ChatTokenizer.read(model))
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
