"""1 when the answer is the ground truth's number, within a tolerance, its unit as asked.

The answer is searched in ``\\boxed{}``, ``<answer>`` tags, after ``####`` and after "the answer is"; if none of them contains a number,
it is the last number of the completion (``where = "auto"``). Part ``has_answer`` is 1 if a number was found.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer, quantity
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.parsing.quantity import Quantity
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text, verdicts_on

NAME = "numeric"
_HEDGED = re.compile(r"[-+−$€£¥]?[0-9][0-9.,]*%?(?:\s(?:or|to|and|vs)\s[-+−$€£¥]?[0-9][0-9.,]*%?)+[.!]?")


class Parameters(Section):
    where: Where | Literal["last_number"] = Field(
        default="auto", description="Place of the answer; auto: boxed, tags, ####, a phrase, else the last number."
    )
    absolute: float = Field(default=0.0, ge=0.0, description="Largest allowed difference.")
    relative: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Largest allowed difference as a share of the ground truth."
    )
    percent: Literal["either", "ornament", "value"] = Field(
        default="either",
        description="50% equals 50 (ornament), 0.5 (value), or, if only one side has the sign, both (either).",
    )
    units: Literal["ignore", "same", "convert"] = Field(
        default="ignore",
        description="ignore: any unit; same: require the truth's unit; convert: convert units, such as km to m.",
    )


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare every completion's number with the truth's, which may have a unit, or be a solution with ####."""
    text = truth_text(truth, NAME)
    gold = quantity.read(final_answer.after_hashes(text) or final_answer.find(text, "boxed") or text)
    if gold is None:
        raise BadGroundTruth(f"{NAME}: the row's ground_truth must be a number, got {text[:80]!r}")
    answers = (_answer(final_answer.spoken(completion), parameters.where) for completion in completions)
    return verdicts_on(answers, partial(is_equal, parameters, gold))


def is_equal(parameters: Parameters, gold: Quantity, answer: Quantity) -> bool:
    factor = _factor(parameters.units, gold.unit, answer.unit)
    if factor is None:
        return False
    number = answer.number * factor
    allowed = max(Fraction(parameters.absolute), Fraction(parameters.relative) * abs(gold.number))
    return any(abs(mine - wanted) <= allowed for wanted, mine in _readings(parameters.percent, gold, answer, number))


def _answer(completion: str, where: str) -> Quantity | None:
    if where == "last_number":
        return quantity.last(completion)
    if where != "auto":
        answer = final_answer.find(completion, where)  # pyright: ignore[reportArgumentType] the rest are its own
        return None if answer is None else quantity.read(answer)
    for way in (final_answer.latex.last_boxed, final_answer.in_tags, final_answer.after_hashes):
        answer = way(completion)
        if answer is not None:
            return quantity.read(answer)
    phrase = final_answer.after_phrase(completion)
    line = phrase or final_answer.last_line(completion) or ""
    read = quantity.read(line) if quantity.begins(line) else None
    if _HEDGED.fullmatch(line):
        return None
    is_alone = read is not None and (not re.search("[0-9]", read.unit) or quantity.read_units(read.unit) is not None)
    return read if is_alone or (phrase and line and quantity.begins(line)) else quantity.last(completion)


def _factor(rule: str, gold: str, answer: str) -> Fraction | None:
    """Return the factor from the answer's unit to the truth's; None if they cannot be converted."""
    if rule == "ignore" or _joined(gold) == _joined(answer):
        return Fraction(1)
    wanted, actual = quantity.read_units(gold), quantity.read_units(answer)
    if wanted is None or actual is None or wanted.dimension != actual.dimension:
        return None
    return actual.factor / wanted.factor if rule == "convert" or actual.factor == wanted.factor else None


def _joined(unit: str) -> str:
    return "".join(word.casefold() if len(word) >= quantity.FOLDED else word for word in unit.split())


def _readings(rule: str, gold: Quantity, answer: Quantity, number: Fraction) -> list[tuple[Fraction, Fraction]]:
    """Return the pairs (truth, answer); one of them must be equal within the tolerance."""
    plain = (gold.number, number)
    if rule == "ornament":
        return [plain]
    valued = (gold.number / (100 if gold.is_percent else 1), number / (100 if answer.is_percent else 1))
    if rule == "value" or gold.is_percent == answer.is_percent:
        return [valued if rule == "value" else plain]
    return [plain, valued]


REWARD = PureReward(
    name=NAME,
    description="1 when the answer is the ground truth's number, within max(absolute, relative * truth), its unit as asked",
    judge=judge,
    parameters=Parameters,
    reads="answer",
    parts=("has_answer",),
    notes="compared exactly, as fractions; reads thousands, mixed and vulgar fractions, `3 × 10⁸`, `%` and currency; hedging "
    '(`42 or 43`), ranges, decimal commas and powers are not numbers; with `percent = "either"` 50 % is 50 and 0.5',
    success=1.0,
)
