"""1 when the answer on the last line that begins its answer with ``Answer:`` has the value of the ground truth.

The format that DAPO's prompts ask for, and verl's `math_dapo` reads. If the line has a box, its content is the
answer; without such a line the last ``\\boxed{}`` counts. Answers are compared as in the reward `math`, where verl
compares texts.
"""

from __future__ import annotations

import re
from functools import partial

from penstock.reward_service.rewards import math_answer
from penstock.reward_service.rewards.parsing import latex
from penstock.reward_service.rewards.reward import GradedReward

NAME = "answer_line"

_LINE = re.compile(r"\banswer\s*:[ \t*]*\n?([^\n]+)", re.IGNORECASE)
_DATA_SETS = (
    "math_dapo", "math_dapo_reasoning", "BytedTsinghua-SIA/DAPO-Math-17k", "aime", "aime24", "aime2024", "aime2025",
    "aime25", "aime_2024", "aime_2025", "HuggingFaceH4/aime_2024",
)  # fmt: skip


def last_answer(text: str) -> str | None:
    """Return the answer on the last ``Answer:`` line, else the one in the last box, else None."""
    line = None
    for match in _LINE.finditer(text):
        line = match[1].strip().strip("*").strip()
    if line is None:
        return latex.last_boxed(text)
    boxed = latex.last_boxed(line)
    if boxed is not None:
        return boxed
    return line or None


REWARD = GradedReward(
    name=NAME,
    description="1 when the answer on the last line 'Answer: ...', else in the last \\boxed{}, equals the ground truth",
    judge=partial(math_answer.judge_with, find=last_answer, part="has_answer"),
    parameters=math_answer.Parameters,
    grader="math",
    reads="answer",
    data_sources=_DATA_SETS,
    parts=("has_answer", "timeout"),
    notes="compared as `math` compares",
    success=1.0,
)
