"""The data of ``penstock quickstart --task tools``: a question whose answer has to be asked for.

``get 37`` is answered right by asking (``?37``), reading the reply of the environment ``lookup`` (two digits, which another group
has otherwise), and repeating it: two turns, and nothing to learn by heart. The examples of the warm-up show the form of both turns; each
of their turns is right half of the time, so that about one episode in twenty succeeds when the reinforcement learning begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_KEYS = 100
MAX_NEW_TOKENS = 5  # "?37" or two digits, and the end of turn
_RIGHT = 0.5  # share of the examples' turns


def write_data(folder: Path, *, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; what a key's value is follows from a group's seed, not from these."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 2])
    _write_rows(folder / "sft.jsonl", (_example(rng) for _ in range(num_sft)))
    _write_rows(folder / "train.jsonl", (_question(int(key)) for key in rng.integers(NUM_KEYS, size=num_train)))
    _write_rows(folder / "eval.jsonl", (_question(number % NUM_KEYS) for number in range(num_eval)))


def _question(key: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"get {key:02d}"}], "data_source": "lookup"}


def _example(rng: np.random.Generator) -> dict[str, Any]:
    key, asked, value, said = (int(number) for number in rng.integers(NUM_KEYS, size=4))
    if rng.random() < _RIGHT:
        asked = key
    if rng.random() < _RIGHT:
        said = value
    texts = (
        ("user", f"get {key:02d}"),
        ("assistant", f"?{asked:02d}"),
        ("user", f"{value:02d}"),
        ("assistant", f"{said:02d}"),
    )
    return {"messages": [{"role": role, "content": text} for role, text in texts]}


def _write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
