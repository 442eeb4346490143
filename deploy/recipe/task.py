"""The task of ``penstock recipe``: sums of two two-digit numbers, with a pretrained chat model.

8100 problems, of which those with ``crc32(question) % 10 == 0`` are held out: no training sees them. The warm-up teaches
the form of an answer, on sums of one-digit numbers; what the model knows of two digits it learns from rewards.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SYSTEM_PROMPT = "Answer with a number."  # short: a template without a system message puts a longer one of its own
MAX_NEW_TOKENS = 6  # three digits and the end of turn, and room for a wrong answer
_EVAL_SEED = 0


def problems(*, held_out: bool) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [pair for pair in pairs if (zlib.crc32(question(*pair).encode()) % 10 == 0) == held_out]


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def write_data(folder: Path, *, seed: int, num_eval: int) -> int:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; return the number of training prompts.

    The held-out problems are the same for every seed, so that runs can be compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen, unseen = problems(held_out=False), problems(held_out=True)
    random.Random(seed).shuffle(seen)  # noqa: S311 - data, not secrets
    random.Random(_EVAL_SEED).shuffle(unseen)  # noqa: S311 - the same
    _write(folder / "sft.jsonl", (_example(a, b) for a in range(10) for b in range(10)))
    _write(folder / "train.jsonl", (_prompt(*pair) for pair in seen))
    _write(folder / "eval.jsonl", (_prompt(*pair) for pair in unseen[:num_eval]))
    return len(seen)


def _example(a: int, b: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": str(a + b)}]}


def _prompt(a: int, b: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question(a, b)}]
    return {"prompt": prompt, "ground_truth": str(a + b), "data_source": "exact_match"}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
