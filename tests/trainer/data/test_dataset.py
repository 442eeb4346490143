"""Data files of every format become prompts and turns; malformed rows are reported by file, line and column."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.data.row_sets import prompt_set, turn_set, write_rows

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.trainer.data import dataset
from penstock.trainer.data.dataset import PromptSet, reward_name
from penstock.trainer.data.read_rows import detect, prompt_row, rename, turn_rows
from penstock.trainer.data.row_checks import MAX_PROBLEMS_SHOWN
from penstock.trainer.data.row_files import fingerprint, open_rows
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

CHAT = [{"role": "user", "content": "sort 21"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "12"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"split": "train", "index": 3},
}
FLAT = {"prompt": "sort 21", "ground_truth": "12", "data_source": "sort"}


def text_of(tokenizer: ChatTokenizer, token_ids: Any) -> str:
    return tokenizer._tokenizer.decode(list(token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize(
    ("row", "truth", "source"),
    [
        (VERL, '"12"', "openai/gsm8k"),
        (FLAT, '"12"', "sort"),
        ({"prompt": CHAT}, None, ""),
        ({"prompt": "sort 21", "completion": "12"}, None, ""),
        ({"prompt": CHAT, "completion": [ANSWERED[1]]}, None, ""),
        ({"messages": ANSWERED}, None, ""),
        ({"messages": CHAT, "ground_truth": "12"}, '"12"', ""),
        ({"question": "sort 21", "answer": "12"}, '"12"', ""),
    ],
)
def test_every_format_in_every_kind_of_file_gives_the_same_prompt(
    tmp_path: Path, tokenizer: ChatTokenizer, kind: str, row: dict, truth: str | None, source: str
):
    """verl, TRL, messages, flat and question/answer rows are recognised in JSONL, JSON, CSV and Parquet."""
    loaded = prompt_set(write_rows(tmp_path, row, row, kind=kind), tokenizer)
    assert len(loaded) == 2
    prompt = loaded[1]
    assert prompt.index == 1
    assert prompt.text == "<|im_start|>user\nsort 21<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids == tuple(tokenizer.encode(prompt.text))
    assert (prompt.reward.name, prompt.reward.ground_truth, prompt.reward.data_source) == ("r", truth, source)
    assert loaded.num_tokens == 2 * len(prompt.token_ids)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"messages": ANSWERED}, {}),
        ({"prompt": "sort 21", "response": "12"}, {}),
        ({"prompt": "sort 21", "completion": "12"}, {}),
        ({"prompt": CHAT, "completion": [ANSWERED[1]]}, {"format": "trl"}),
        ({"question": "sort 21", "answer": "12"}, {}),
        ({"instruction": "sort 21", "output": "12"}, {"map": {"prompt": "instruction", "response": "output"}}),
        (FLAT, {"map": {"response": "ground_truth"}}),
    ],
)
def test_every_format_gives_the_same_turn(tmp_path: Path, tokenizer: ChatTokenizer, kind: str, row: dict, data: dict):
    """The loss mask of a row covers exactly the answer and its end token, in every format."""
    turn = turn_set(write_rows(tmp_path, row, kind=kind), tokenizer, **data)[0]
    text = "<|im_start|>user\nsort 21<|im_end|>\n<|im_start|>assistant\n12<|im_end|>"
    assert turn.token_ids.dtype == np.int32
    assert turn.token_ids.tolist() == tokenizer.encode(text)
    assert text_of(tokenizer, turn.token_ids[turn.loss_mask]) == "12<|im_end|>"


def test_every_assistant_turn_is_trained_once(tmp_path: Path, tokenizer: ChatTokenizer):
    """A conversation becomes one turn per answer, each after exactly the chat that inference would get."""
    chat = [*ANSWERED, {"role": "user", "content": "sort 43"}, {"role": "assistant", "content": "34"}]
    loaded = turn_set(write_rows(tmp_path, {"messages": chat}), tokenizer, system_prompt="be brief")
    trained = [text_of(tokenizer, t.token_ids[t.loss_mask]) for t in map(loaded.__getitem__, (0, 1))]
    assert trained == ["12<|im_end|>", "34<|im_end|>"]
    before = text_of(tokenizer, loaded[1].token_ids[~loaded[1].loss_mask])
    assert before.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert before.endswith("12<|im_end|>\n<|im_start|>user\nsort 43<|im_end|>\n<|im_start|>assistant\n")


def test_other_columns_reach_the_reward(tmp_path: Path, tokenizer: ChatTokenizer):
    """extra_info holds the row's other columns and its own entries, which take precedence; decimals as text."""
    row = {**FLAT, "level": 3, "index": 1, "price": Decimal("1.50"), "extra_info": {"index": 7}}
    request = prompt_set(write_rows(tmp_path, row, kind="parquet"), tokenizer)[0].reward
    assert json.loads(request.extra_info) == {"level": 3, "index": 7, "price": "1.50"}
    verl = prompt_set(write_rows(tmp_path, VERL), tokenizer)[0].reward
    assert json.loads(verl.extra_info) == {"ability": "math", "split": "train", "index": 3}


def test_columns_with_other_names_are_mapped(tmp_path: Path, tokenizer: ChatTokenizer):
    """data.map names columns, also nested ones, and a system prompt is put before chats without one."""
    row = {"q": "sort 21", "info": {"gold": [1, 2]}, "kind": "s"}
    mapping = {"prompt": "q", "ground_truth": "info.gold", "data_source": "kind"}
    prompt = prompt_set(write_rows(tmp_path, row), tokenizer, map=mapping, system_prompt="be brief")[0]
    assert prompt.text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsort 21")
    assert (prompt.reward.ground_truth, prompt.reward.data_source) == ("[1, 2]", "s")
    own = {"prompt": [{"role": "system", "content": "own"}, *CHAT]}
    assert "brief" not in prompt_set(write_rows(tmp_path, own), tokenizer, system_prompt="be brief")[0].text


def test_reward_names_follow_source_then_name_then_service():
    both = RewardSettings(name="mine", by_source={"gsm8k": "special"})
    assert reward_name(both, "gsm8k") == "special"
    assert reward_name(both, "other") == "mine"
    assert reward_name(RewardSettings(name=None), "other") == "auto"
    with pytest.raises(MalformedData, match=r"column data_source: missing, and reward\.name"):
        reward_name(RewardSettings(name=None), "")


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        ({"x": 1}, "no format recognised from the columns x; expected prompt, messages, or question and answer"),
        ({}, "no format recognised from the columns (none)"),
        ([1], "expected an object with columns, got list"),
        ({"prompt": 3}, "column prompt: expected a text or a list of messages, got 3"),
        ({"prompt": " "}, "column prompt: expected a text, got an empty one"),
        ({"prompt": []}, "column prompt: expected a text or a list of messages, got an empty list"),
        ({"prompt": ["hi"]}, "column prompt[0]: expected a message with role and content, got 'hi'"),
        ({"prompt": [{"content": "x"}]}, "column prompt[0].role: expected a role such as user, got nothing"),
        ({"prompt": [{"role": "user", "content": 4}]}, "column prompt[0].content: expected a text, got 4"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "column images: expected an image for each of 1 places (<image> in a text, or a part of type image ",
        ),
        ({"prompt": ANSWERED}, "column prompt: expected the chat to end with a message to answer"),
        ({"messages": [ANSWERED[1]]}, "column messages: expected the chat to end with a message to answer, got none"),
        ({**VERL, "reward_model": "rule"}, "column reward_model: expected an object with style and ground_truth, got"),
        ({**VERL, "reward_model": {"style": "rule"}}, "column reward_model.ground_truth: expected the right answer"),
        ({**FLAT, "data_source": 3}, "column data_source: expected a text, got 3"),
        ({**FLAT, "extra_info": "x"}, "column extra_info: expected an object, got 'x'"),
    ],
)
def test_a_malformed_row_is_reported_with_line_and_column(tmp_path: Path, tokenizer: ChatTokenizer, row, reply: str):
    path = write_rows(tmp_path, FLAT, FLAT, row)
    with pytest.raises(MalformedData) as caught:
        prompt_set(path, tokenizer)
    assert str(caught.value).startswith(f"{path}:3: {reply}")


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        ({"messages": CHAT}, "column messages: expected an assistant message to imitate, got roles ['user']"),
        (FLAT, "column response: missing, nothing to imitate; the row has data_source, ground_truth, prompt"),
        ({"prompt": "x", "response": ""}, "column response: expected a text, got an empty one"),
    ],
)
def test_a_row_without_an_answer_cannot_be_imitated(tmp_path: Path, tokenizer: ChatTokenizer, row, reply: str):
    with pytest.raises(MalformedData) as caught:
        turn_set(write_rows(tmp_path, row), tokenizer)
    assert f":1: {reply}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "reply"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": \n', ":3: not JSON (Expecting value at column"),
        ("a.jsonl", b'{"prompt": NaN}\n', ":1: not JSON (NaN is not JSON)"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', ":1: not UTF-8 text (at byte 12 of the line)"),
        ("a.json", b'[{"prompt": "x"},\n{"prompt": y}]\n', ":2: not JSON (Expecting value"),
        ("a.json", b'[{"prompt": "x"}\n {"prompt": "y"}]', ":2: not JSON (Expecting ',' delimiter at column"),
        ("a.json", b'[{"prompt": "x"}', ":1: not JSON (Expecting ',' delimiter at column"),
        ("a.json", b"[]", ": no rows"),
        (
            "a.csv",
            b"prompt,ground_truth\nx,1\ny\n",
            ":3: expected 2 cells as in the header (prompt, ground_truth), got 1",
        ),
        ("a.csv", b'prompt,ground_truth\n"x,1\n', ":2: not CSV (unexpected end of data)"),
        ("a.csv", b'prompt,reward_model\nx,"{""style"": "\n', ":2: column reward_model: expected JSON text, got"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", ": expected JSON lines, a JSON array, CSV or Parquet; it begins with"),
        ("a.txt", b"hello", ": expected JSON lines, a JSON array, CSV or Parquet; it begins with b'hello'"),
        ("a.jsonl", b" \n", ": the file is empty"),
    ],
)
def test_a_broken_file_is_reported_with_its_position(
    tmp_path: Path, tokenizer: ChatTokenizer, name, content, reply: str
):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(MalformedData) as caught:
        prompt_set(path, tokenizer)
    assert str(caught.value).startswith(f"{path}{reply}")


def test_a_parquet_row_is_reported_by_its_number(tmp_path: Path, tokenizer: ChatTokenizer):
    path = write_rows(tmp_path, VERL, {**VERL, "prompt": []}, kind="parquet")
    with pytest.raises(MalformedData, match=r"rows\.parquet: row 2: column prompt: expected"):
        prompt_set(path, tokenizer)


def test_all_malformed_rows_are_refused_together(tmp_path: Path, tokenizer: ChatTokenizer):
    """The first twenty are shown and the rest counted, over all files."""
    bad = write_rows(tmp_path, *[{"prompt": n} for n in range(30)])
    good = write_rows(tmp_path, FLAT, kind="json")
    with pytest.raises(MalformedData) as caught:
        prompt_set([good, bad], tokenizer)
    lines = str(caught.value).split("\n")
    assert len(lines) == MAX_PROBLEMS_SHOWN + 1
    assert lines[-1] == "and 10 rows with other problems"


def test_a_missing_mapped_column_is_reported(tmp_path: Path, tokenizer: ChatTokenizer):
    with pytest.raises(MalformedData, match=r":1: column q: missing \(data.map.prompt\); the row has prompt"):
        prompt_set(write_rows(tmp_path, {"prompt": "x"}), tokenizer, map={"prompt": "q"})
    with pytest.raises(MalformedData, match=r"column reward_model: missing in a row of format verl"):
        prompt_set(write_rows(tmp_path, FLAT), tokenizer, format="verl")


def test_long_prompts_are_dropped_and_counted_or_refused(tmp_path: Path, tokenizer: ChatTokenizer):
    """data.overlong decides; a set without remaining rows is refused in any case."""
    path = write_rows(tmp_path, FLAT, {**FLAT, "prompt": "sort 12345678"}, FLAT)
    loaded = prompt_set(path, tokenizer, max_prompt_tokens=16)
    assert len(loaded) == 2
    assert loaded.dropped == {"overlong": 1}
    assert [loaded[i].index for i in (0, 1)] == [0, 1]
    with pytest.raises(MalformedData, match=r":2: 21 tokens, the limit is 16; raise it, or set data.overlong"):
        prompt_set(path, tokenizer, max_prompt_tokens=16, overlong="error")
    with pytest.raises(MalformedData, match="no row is left: all 3 are longer than the limit of 3 tokens"):
        prompt_set(path, tokenizer, max_prompt_tokens=3)
    answered = write_rows(tmp_path, *[{"prompt": "sort 21", "response": "12"}] * 2, kind="json")
    with pytest.raises(MalformedData, match="no row is left: all 2 are longer than the limit of 10 tokens"):
        turn_set(answered, tokenizer, max_tokens=10)


def test_only_the_first_samples_are_read(tmp_path: Path, tokenizer: ChatTokenizer):
    """data.max_samples counts rows over all files, in their order."""
    first, second = write_rows(tmp_path, *[FLAT] * 3), write_rows(tmp_path, *[{**FLAT, "prompt": "b"}] * 3, kind="json")
    loaded = prompt_set([first, second], tokenizer, max_samples=4)
    assert len(loaded) == 4
    assert "user\nb" in loaded[3].text


def test_a_file_that_changes_during_the_run_is_detected(tmp_path: Path, tokenizer: ChatTokenizer):
    """A row that has become malformed since the start is refused, and other content has another fingerprint."""
    path = write_rows(tmp_path, FLAT, FLAT)
    loaded = prompt_set(path, tokenizer)
    before = path.read_text()
    path.write_text(before.replace("prompt", "promqt"))
    with pytest.raises(MalformedData, match=r":2: no format .*the file has changed since the start"):
        _ = loaded[1]
    assert fingerprint([path]) != loaded.fingerprint
    path.write_text(before)
    assert fingerprint([path]) == loaded.fingerprint


def test_the_prompts_used_last_are_not_read_again(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path, *[FLAT | {"prompt": f"sort {number}"} for number in range(10, 20)])
    prompts = PromptSet([path], data=DataSettings(), reward=RewardSettings(), tokenizer=tokenizer)
    numbers: list[int] = []
    read = prompts._read_again
    monkeypatch.setattr(prompts, "_read_again", lambda index: numbers.append(index) or read(index))
    monkeypatch.setattr(dataset, "KEPT_TOKENS", 3 * len(read(0).token_ids))
    first = [prompts[number] for number in range(3)]
    assert [prompts[number] for number in (0, 2, 1)] == [first[number] for number in (0, 2, 1)]
    assert numbers == [0, 1, 2]
    assert prompts[3].text != first[0].text  # 0 is the least recently used one now
    assert [prompts[number] for number in (2, 1, 0)] == [first[number] for number in (2, 1, 0)]
    assert numbers == [0, 1, 2, 3, 0]


def test_a_template_that_renders_answers_differently_is_refused(tmp_path: Path):
    write_model(tmp_path, seed=0)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    path = write_rows(tmp_path, {"prompt": "a", "response": "b"})
    with pytest.raises(MalformedData, match="renders the answer differently from its own generation prompt"):
        turn_set(path, ChatTokenizer.read(tmp_path))


def test_a_completion_always_ends(tmp_path: Path):
    write_model(tmp_path, seed=0)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = ChatTokenizer.read(tmp_path)
    turn = turn_set(write_rows(tmp_path, {"prompt": "a", "response": "b"}), tokenizer)[0]
    assert text_of(tokenizer, turn.token_ids) == "user:aassistant:b<|im_end|>"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
column_names = st.sampled_from(
    ["prompt", "messages", "question", "answer", "ground_truth", "extra_info", "reward_model", "x"]
)


@given(st.dictionaries(column_names, json_values))
def test_any_row_is_read_or_refused_with_a_reason(row: dict):
    """For any JSON row, reading either works or raises MalformedData, and no other error."""
    for read in (prompt_row, turn_rows):
        try:
            read(rename(row, DataSettings(), nested_texts=True), DataSettings())
        except MalformedData:
            continue


@examples(50, without=(HealthCheck.function_scoped_fixture,))
@given(
    st.lists(st.dictionaries(st.text(), json_values, min_size=1), min_size=1, max_size=8),
    st.booleans(),
    st.integers(0, 3),
)
def test_json_rows_are_read_in_any_order(tmp_path: Path, rows: list[dict], as_array: bool, indent: int):
    """Rows of JSONL and JSON arrays are read by number, without null columns."""
    path = tmp_path / ("x.json" if as_array else "x.jsonl")
    path.write_text(json.dumps(rows, indent=indent) if as_array else "\n\n".join(json.dumps(row) for row in rows))
    file = open_rows(path)
    assert len(file) == len(rows)
    for number in reversed(range(len(rows))):
        assert file.row(number) == {name: value for name, value in rows[number].items() if value is not None}


@pytest.mark.parametrize("text", ["[1] is a list", '[{"a": 1}]', '{"role": "user"}', "[{'role': 'user'}]", "[{"])
def test_prompts_that_look_like_json_stay_texts(tmp_path: Path, tokenizer: ChatTokenizer, text: str):
    """In CSV only a JSON text that is a chat is parsed; code and data in a prompt are not changed."""
    [row] = [open_rows(write_rows(tmp_path, {"prompt": text}, kind="csv")).row(0)]
    chat = prompt_row(rename(row, DataSettings(), nested_texts=True), DataSettings()).chat
    assert chat == ({"role": "user", "content": text},)
    with pytest.raises(MalformedData, match=r":2: column messages: expected a list of messages, got"):
        prompt_set(write_rows(tmp_path, {"messages": text}, kind="csv"), tokenizer)


def test_detection_prefers_the_more_specific_format():
    assert detect({"messages": [], "prompt": "x"}).name == "messages"
    assert detect({"prompt": "x", "reward_model": {}}).name == "verl"
    assert detect({"prompt": "x", "completion": "y", "ground_truth": "z"}).name == "trl"
    assert detect({"question": "x", "answer": "y"}).name == "question_answer"
