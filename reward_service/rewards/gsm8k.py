"""1 when the number after the last ``####`` is the ground truth's number; the answer format of GSM8K.

Accepts more than verl's strict rule: no space after ``####``, a currency sign, a trailing dot, ``3.0`` for ``3``, fractions and bold
digits; less where a second number follows (``42 41``). A completion without ``####`` and a number is wrong, as in verl. There is no
partial credit for the format: the part ``has_answer`` counts it instead.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer, latex, quantity
from penstock.reward_service.rewards.parsing.latex import NUMBER, read_number
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text, verdicts_on

NAME = "gsm8k"
FLEXIBLE = "gsm8k_flexible"
_ANY = re.compile(rf"(?<![0-9.]){NUMBER}")


def last_answer(text: str) -> Fraction | None:
    """Return the number after the last ``####`` that has one, else None; also None if it goes on: ``42 41``, ``42 or 43``."""
    lines = [part.lstrip().partition("\n")[0] for part in text.split("####")[1:]]
    line = next((line for line in reversed(lines) if any(map(str.isdecimal, line))), "")
    number = quantity.read(latex.last_boxed(line) or line)
    return None if number is None else number.number


def judge(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    return verdicts_on(map(last_answer, map(final_answer.spoken, completions)), _gold(truth, NAME).__eq__)


def judge_flexible(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare the last number of every completion, wherever it stands (verl's flexible method), by value."""
    return verdicts_on(map(last_number, map(final_answer.spoken, completions)), _gold(truth, FLEXIBLE).__eq__)


def _gold(truth: Any, name: str) -> Fraction:
    text = truth_text(truth, name)
    gold = last_answer(text) if "####" in text else read_number(text)
    if gold is None:
        raise BadGroundTruth(f"{name}: the row's ground_truth must be a number, got {text[:80]!r}")
    return gold


def last_number(text: str) -> Fraction | None:
    number_text = last_number_text(text)
    return None if number_text is None else read_number(number_text)


def last_number_text(text: str) -> str | None:
    last_match = None
    for match in _ANY.finditer(text):
        last_match = match
    return None if last_match is None else last_match[0]


REWARD = PureReward(
    name=NAME,
    description="1 when the number after the last #### is the ground truth's number",
    judge=judge,
    reads="answer",
    data_sources=("gsm8k", "openai/gsm8k", "gsm8k_main"),
    parts=("has_answer",),
    notes="a completion without #### is wrong",
    success=1.0,
)

FLEXIBLE_REWARD = PureReward(
    name=FLEXIBLE,
    description="1 when the last number, wherever it stands, is the ground truth's number",
    judge=judge_flexible,
    reads="answer",
    parts=("has_answer",),
    notes="a number mentioned last counts as the answer",
    success=1.0,
)
