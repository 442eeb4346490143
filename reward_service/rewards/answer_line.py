"""1 when the answer on the last line that begins its answer with ``Answer:`` has the value of the ground truth.

The format that DAPO's prompts ask for, and verl's `math_dapo` reads. A box on the line is read out of it; where
there is no such line, the last ``\\boxed{}`` counts. Compared as the reward `math` compares, where verl compares
texts; a unit in words behind a number is left out.
"""

from __future__ import annotations

import re

from penstock.reward_service.rewards.parsing import latex
from penstock.reward_service.rewards.parsing.number import NUMBER

NAME = "answer_line"

_LINE = re.compile(r"\banswer\s*:[ \t*]*\n?([^\n]+)", re.IGNORECASE)
_WITH_UNIT = re.compile(rf"(?P<number>{NUMBER})\s+[A-Za-z][A-Za-z .]*")


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
    with_unit = _WITH_UNIT.fullmatch(line)
    return with_unit["number"] if with_unit else line or None
