"""Define what `penstock quickstart` can train: the data of each task, and the settings under which the tiny model learns it.

The task ``tools`` asks a question whose answer has to be looked up. ``get 37`` is answered right by asking (``?37``), reading the
reply of the environment ``lookup`` (two digits, which differ between groups), and repeating it: two turns, and nothing to
memorise. In the examples of the warm-up each turn is right half of the time, so that about one episode in twenty succeeds when
the reinforcement learning begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.deploy import quickstart_task
from penstock.deploy.quickstart_task import write_rows

NUM_KEYS = 100
TOOLS_MAX_NEW_TOKENS = 5  # "?37" or two digits, and the end of turn
_RIGHT = 0.5  # share of the examples' turns


def write_tools_data(folder: Path, *, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; what a key's value is follows from a group's seed, not from these."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 2])
    write_rows(folder / "sft.jsonl", (_example(rng) for _ in range(num_sft)))
    write_rows(folder / "train.jsonl", (_question(int(key)) for key in rng.integers(NUM_KEYS, size=num_train)))
    write_rows(folder / "eval.jsonl", (_question(number % NUM_KEYS) for number in range(num_eval)))


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


@dataclass(frozen=True, slots=True)
class QuickstartTask:
    name: str
    does: str  # what the model learns, for people
    question: str  # a prompt to try afterwards
    write_data: Callable[..., None]
    steps: int
    groups_per_step: int
    group_size: int
    groups_per_message: int
    max_new_tokens: int
    lr: float
    num_eval: int
    sft_steps: int
    sft_batch: int
    sft_lr: float
    sft_warmup_steps: int
    reward: str
    rollout: str = ""
    eval: str = ""
    learnt: str = "accuracy"  # what the share of right answers is called


SORT = QuickstartTask(
    name="sort",
    does=f"sort {quickstart_task.NUM_DIGITS} digits",
    question="sort 31415926",
    write_data=quickstart_task.write_data,
    steps=150,
    groups_per_step=48,
    group_size=8,
    groups_per_message=12,
    max_new_tokens=quickstart_task.MAX_NEW_TOKENS,
    lr=5e-4,
    num_eval=500,
    sft_steps=60,
    sft_batch=128,
    sft_lr=3e-3,
    sft_warmup_steps=20,
    reward='name = "exact_match"',
)
TOOLS = QuickstartTask(
    name="tools",
    does="ask for what it is asked, in two turns",
    question="get 37",
    write_data=write_tools_data,
    steps=120,
    groups_per_step=24,
    group_size=8,
    groups_per_message=6,
    max_new_tokens=TOOLS_MAX_NEW_TOKENS,
    lr=1e-3,
    num_eval=200,
    sft_steps=200,
    sft_batch=128,
    sft_lr=1.5e-3,
    sft_warmup_steps=40,
    rollout='environment = "lookup"      # an episode of several turns for each sample, see docs/environments.md\n',
    reward='name = "environment"        # what the environment gives\nsuccess = { environment = 1.0 }',
    eval="temperature = 1.0           # as it is trained: its most likely answer is right long before\n",
    learnt="success",
)
TASKS = {task.name: task for task in (SORT, TOOLS)}
