"""What `penstock quickstart` can train: the data of each task, and the settings under which the tiny model learns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.deploy import quickstart_task, quickstart_tools


@dataclass(frozen=True, slots=True)
class QuickstartTask:
    """One task; ``rollout``, ``reward`` and ``eval`` are lines of the run file's sections of these names."""

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
    write_data=quickstart_tools.write_data,
    steps=120,
    groups_per_step=24,
    group_size=8,
    groups_per_message=6,
    max_new_tokens=quickstart_tools.MAX_NEW_TOKENS,
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
