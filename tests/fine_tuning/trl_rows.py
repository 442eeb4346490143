"""The rows that TRL's trainers and ours are compared on: the same texts in the same order, without shuffling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_ROWS = 400
NUM_STEPS = 50
BATCH = 8


def pairs(seed: int = 0, num: int = NUM_ROWS) -> Iterator[dict[str, Any]]:
    """Yield preferences: the sorted digits of a question over the digits as they were, shortened by one at times."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        digits = "".join(str(digit) for digit in rng.integers(0, 10, size=int(rng.integers(3, 20))))
        shortened = digits[: len(digits) - int(rng.integers(0, 2))]
        chosen = "".join(sorted(digits))
        yield {
            "prompt": f"sort {digits}",
            "chosen": chosen,
            "rejected": shortened if shortened != chosen else f"{chosen}0",
        }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(path: Path) -> None:
    write(path, ({**row, "margin": float(number % 3)} for number, row in enumerate(pairs())))


def is_good(number: int) -> bool:
    return number % 3 != 1


def write_labelled(path: Path, *, seed: int = 0, num: int = NUM_ROWS) -> None:
    rows = [(row, is_good(number)) for number, row in enumerate(pairs(seed, num))]
    answers = ((row["prompt"], row["chosen" if good else "rejected"], good) for row, good in rows)
    write(path, ({"prompt": prompt, "completion": one, "label": good} for prompt, one, good in answers))


def write_turns(path: Path, *, seed: int = 0, num: int = NUM_ROWS) -> None:
    """Write the rows as chats to imitate: the question and its preferred answer."""
    write(path, ({"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(seed, num)))
