"""Rows in the schemas of much used data sets (`tests/data/wild/rows.jsonl`): what each verb trains, or why not.

A verb that an entry does not name refuses its row. `python -m tests.trainer.data.test_wild_rows` prints what is read.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.generate import WILD, wild_rows
from tests.trainer.data.row_sets import trained_texts, write_rows
from tests.trainer.data.test_chat_template import write_folder
from tests.trainer.data.test_rows_in_the_wild import TEMPLATES

from penstock.deploy.data_check.check import check_file
from penstock.deploy.data_check.show_rows import MARKS, shown_rows
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.data.read_rows import prompt_row, read_row
from penstock.trainer.data.row_files import open_rows
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings, TrainerSettings

ENTRIES: list[dict[str, Any]] = [json.loads(line) for line in WILD.read_text().splitlines()]
VERBS = ("train", "sft", "dpo")
_END = "<|im_end|>"


def _said(message: dict[str, Any]) -> str:
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)
    calls = "".join(f" {json.dumps(call['function'])}" for call in message.get("tool_calls", []))
    return f"{message['role']}: {text}{calls}"


def _prompt(path: Path, data: DataSettings, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return chat and ground truth of a prompt; one with images is read without a model that reads them."""
    row = prompt_row(read_row(open_rows(path), 0, data), data)
    if not row.images:
        PromptSet([path], data=data, reward=RewardSettings(name="r"), tokenizer=tokenizer)
    truth = None if row.ground_truth is None else json.loads(row.ground_truth)
    return {"chat": [_said(message) for message in row.chat], **({} if truth is None else {"truth": truth})}


def _answers(path: Path, data: DataSettings, tokenizer: ChatTokenizer) -> list[str]:
    turns = TurnSet([path], data=data, tokenizer=tokenizer, max_tokens=10_000)
    return [text.removesuffix(_END) for text in trained_texts(turns, tokenizer)]


def _pair(path: Path, data: DataSettings, tokenizer: ChatTokenizer) -> list[str]:
    """Return the chat before the answers, and the chosen and the rejected one; empty where a row has no such answer."""
    pairs = PairSet([path], data=data, tokenizer=tokenizer, max_tokens=10_000, takes_one_answer=True)
    texts = [tokenizer.decode(ids.tolist()) for ids in (pairs[0].prompt, pairs[0].chosen, pairs[0].rejected)]
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", texts[0], re.DOTALL)
    return [*(f"{role}: {text}" for role, text in turns), *(text.removesuffix(_END) for text in texts[1:])]


READERS: dict[str, Callable[[Path, DataSettings, ChatTokenizer], Any]] = {
    "train": _prompt,
    "sft": _answers,
    "dpo": _pair,
}


def read(entry: dict[str, Any], path: Path, tokenizer: ChatTokenizer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what each verb reads, and the refusals of those that do not."""
    readings, refusals = {}, {}
    for verb, reader in READERS.items():
        try:
            readings[verb] = reader(path, _data(entry), tokenizer)
        except MalformedData as err:
            refusals[verb] = str(err)
    return readings, refusals


def _data(entry: dict[str, Any]) -> DataSettings:
    return DataSettings.model_validate(entry.get("settings", {}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.read(write_folder(tmp_path_factory.mktemp("model"), TEMPLATES["qwen2.5"]))


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["name"] for entry in ENTRIES])
def test_each_schema_is_read_or_refused_as_its_entry_says(
    entry: dict[str, Any], tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = write_rows(tmp_path, entry["row"])
    readings, refusals = read(entry, path, tokenizer)
    assert readings == {verb: entry[verb] for verb in VERBS if verb in entry}
    report = check_file(path, _data(entry), tokenizer)
    counts = {"train": report.num_grpo, "sft": report.num_sft, "dpo": report.num_dpo}
    assert {verb for verb, count in counts.items() if count} == readings.keys(), report.problems.lines()
    assert bool(report.problems.count) == (not readings)
    if not readings:
        assert entry["refused"] in report.problems.lines()[0]
        assert entry["refused"] in " ".join(refusals.values())
    for note in entry.get("notes", []):
        assert any(note in hint for hint in report.hints()), report.hints()


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["name"] for entry in ENTRIES])
def test_what_is_shown_of_each_schema_is_what_a_batch_holds(
    entry: dict[str, Any], tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path, data = write_rows(tmp_path, entry["row"]), _data(entry)
    settings = TrainerSettings.model_validate({"model": {"path": "m"}}).model_copy(update={"data": data})
    if "train" in entry and "<image>" not in str(entry["train"]):
        prompts = PromptSet([path], data=data, reward=RewardSettings(name="r"), tokenizer=tokenizer)
        shown = [text.partition("\n")[2] for text in shown_rows(path, 9, "grpo", settings, tokenizer, None)]
        assert shown == [prompts[0].text]
    if "sft" in entry:
        shown = [text.partition("\n")[2] for text in shown_rows(path, 9, "sft", settings, tokenizer, None)]
        turns = TurnSet([path], data=data, tokenizer=tokenizer, max_tokens=10_000)
        assert len(shown) == len(turns) == len(entry["sft"])
        for number, text in enumerate(shown):
            ids, mask = turns[number].token_ids, turns[number].loss_mask
            logprobs = np.zeros(len(ids), dtype=np.float32)
            batch = build([Row(token_ids=ids, loss_mask=mask, behaviour_logprobs=logprobs, advantage=0.0, weight=1.0)])
            whole = tokenizer.decode([*batch.input_ids.flatten().tolist(), int(batch.targets[-1])])
            assert text.replace(MARKS[0], "").replace(MARKS[1], "") == whole
            assert text.partition(MARKS[0])[2].partition(MARKS[1])[0] == tokenizer.decode(batch.targets.tolist())
    if "dpo" in entry:
        shown = shown_rows(path, 9, "dpo", settings, tokenizer, None)
        marked = [text.partition(MARKS[0])[2].partition(MARKS[1])[0].removesuffix(_END) for text in shown]
        assert marked == [text for text in entry["dpo"][-2:] if text]


def test_the_table_of_the_documentation_has_every_schema() -> None:
    kinds = {"chat", "tools", "preference", "math", "code", "qa", "vision"}
    assert len(ENTRIES) == len({entry["name"] for entry in ENTRIES}) >= 60
    assert {entry["kind"] for entry in ENTRIES} == kinds
    lines = wild_rows().splitlines()
    assert all(sum(f"| {entry['name']} |" in line for line in lines) == 1 for entry in ENTRIES)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = ChatTokenizer.read(write_folder(folder / "m", TEMPLATES["qwen2.5"]))
        for entry in ENTRIES:
            kept = {key: value for key, value in entry.items() if key not in (*VERBS, "refused")}
            readings, refusals = read(entry, write_rows(folder, entry["row"]), model)
            reason = {} if readings else {"refused": entry.get("refused") or refusals["train"].partition("; ")[0]}
            sys.stdout.write(json.dumps({**kept, **readings, **reason}, ensure_ascii=False) + "\n")
