"""`penstock chat` with a model folder and a real engine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.console.command import penstock, started

from penstock.console.tools import chat
from penstock.console.tools.chat import ChatEngine, ChatEngineError, ChatRefused, has_chat_template
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError

needs_engine = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the embedded engine needs torch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    write_model(root / "runs" / "tiny" / "model", seed=0)
    return root


@pytest.fixture(scope="module")
def engine(runs: Path) -> Iterator[ChatEngine]:
    with ChatEngine(runs / "runs" / "tiny" / "model", device="cpu", dtype="float32") as started:
        yield started


@pytest.mark.slow
@needs_engine
def test_one_prompt_prints_one_answer(runs: Path, engine: ChatEngine):
    printed = started("chat", "tiny", "--prompt", "sort 31", cwd=runs)
    expected = engine.answer([{"role": "user", "content": "sort 31"}], temperature=0.0, max_tokens=64)
    assert printed.stdout == expected + "\n"


@needs_engine
def test_a_conversation_ends_with_its_input(runs: Path):
    """Every line gets an answer or the reason for a refusal, /new clears the conversation, the end of the input ends it."""
    typed = "sort 1\n\n" + "1" * 500 + "\n/new\nsort 2\n"
    answer = started("chat", "tiny", "--keep", "--max-tokens", "4", cwd=runs, typed=typed)
    assert answer.stderr.count("the engine refused") == 1
    assert len(answer.stdout) >= 2  # an untrained model outputs something, possibly blank lines only


@needs_engine
def test_a_model_without_a_template_continues_text(tmp_path: Path):
    """An engine that refuses a long conversation keeps running; no process remains after the end."""
    write_model(tmp_path / "base", seed=0)
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with ChatEngine(tmp_path / "base", device="cpu", dtype="float32") as engine:
        assert not engine.is_chat
        with pytest.raises(ChatRefused, match="the engine refused"):
            engine.answer([{"role": "user", "content": "1" * 500}], temperature=0.0, max_tokens=4)
        assert engine.answer([{"role": "user", "content": "sort 1"}], temperature=0.0, max_tokens=4)
        process = engine._process
        assert process is not None
        assert process.poll() is None
    assert process.poll() is not None


@needs_engine
def test_a_broken_model_shows_the_log_of_the_engine(tmp_path: Path):
    """A folder without weights fails with the end of the engine's log."""
    folder = tmp_path / "broken"
    write_model(folder, seed=0)
    (folder / "model.safetensors").unlink()
    with (
        pytest.raises(ChatEngineError, match=r"(?s)the engine ended with code .*the end of its log"),
        ChatEngine(folder, device="cpu", dtype="float32"),
    ):
        pass


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    """No engine is started for a folder without config.json, nor for a run that has not ended."""
    answer = penstock("chat", "tiny", "--model", str(tmp_path), "--prompt", "x", cwd=tmp_path, code=1)
    assert "has no config.json" in answer.stderr
    (tmp_path / "young").mkdir()
    with pytest.raises(ConfigError, match=r"has no model yet.*--model DIR"):
        chat.find_model(tmp_path / "young", None)


def test_dtype_and_system_prompt_are_those_of_the_run(tmp_path: Path):
    assert chat.trained_with(tmp_path) == ("float32", "")
    settings = {"model": {"dtype": "bfloat16"}, "data": {"system_prompt": "Be brief."}}
    (tmp_path / "config.json").write_text(json.dumps({"settings": settings, "origins": {}}))
    assert chat.trained_with(tmp_path) == ("bfloat16", "Be brief.")


def test_an_answer_is_at_most_half_the_context(runs: Path, tmp_path: Path):
    assert chat.answer_length(runs / "runs" / "tiny" / "model") == 64
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 40960}')
    assert chat.answer_length(tmp_path) == 512


def test_a_chat_template_is_found_in_both_files(tmp_path: Path):
    """Newer folders have chat_template.jinja, older ones a key of tokenizer_config.json."""
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(tmp_path)
