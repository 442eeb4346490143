"""Files of rows, and the sets of prompts, turns and pairs that are read of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.settings import DataSettings

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def write_rows(folder: Path, *rows: Any, kind: str = "jsonl") -> Path:
    """Write ``folder``/rows.``kind``: jsonl, json, csv or parquet."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(rows[0])
            for row in rows:
                writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in row.values()])
    return path


def prompt_set(
    path: Path | list[Path], tokenizer: ChatTokenizer, *, reward: str | None = "r", max_new_tokens: int = 1, **data: Any
) -> PromptSet:
    paths = path if isinstance(path, list) else [path]
    settings, rewards = DataSettings.model_validate(data), RewardSettings(name=reward)
    return PromptSet(paths, data=settings, reward=rewards, tokenizer=tokenizer, max_new_tokens=max_new_tokens)


def turn_set(path: Path, tokenizer: ChatTokenizer, *, max_tokens: int = 10_000, **data: Any) -> TurnSet:
    return TurnSet([path], data=DataSettings.model_validate(data), tokenizer=tokenizer, max_tokens=max_tokens)


def pair_set(path: Path, tokenizer: ChatTokenizer, *, takes_one_answer: bool = True, **data: Any) -> PairSet:
    settings = DataSettings.model_validate(data)
    return PairSet([path], data=settings, tokenizer=tokenizer, max_tokens=10_000, takes_one_answer=takes_one_answer)


def trained_texts(turns: TurnSet, tokenizer: ChatTokenizer) -> list[str]:
    """Return what is trained of each example."""
    examples = [turns[number] for number in range(len(turns))]
    return [tokenizer.decode(turn.token_ids[turn.loss_mask].tolist()) for turn in examples]
