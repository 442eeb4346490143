"""1 when a regular expression matches somewhere in the answer, or matches all of it.

The expression is in the run file (``pattern``) or is the row's ground truth. Python's expressions may take exponential time on a text
that a policy chose, so they run in grader processes with a CPU limit (`pattern_grader`): a completion that exhausts it twice counts as
no match (part ``timeout``), because it alone is the cause. Answers longer than `MAX_CHARS` do not match either (part ``too_long``).
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.math_answer import Grade, Graded
from penstock.reward_service.rewards.parsing import final_answer
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.reward import GradedReward, Verdict, truth_text

NAME = "regex"
MAX_CHARS = 200_000
MAX_PATTERN_CHARS = 10_000


class Parameters(Section):
    pattern: str = Field(
        default="",
        max_length=MAX_PATTERN_CHARS,
        description="Regular expression of Python's re; none: the row's ground truth.",
    )
    match: Literal["search", "whole"] = Field(
        default="search", description="Match anywhere in the answer (search), or all of it (whole)."
    )
    where: Where = Field(default="whole", description="Place of the answer; whole: the completion.")
    ignore_case: bool = Field(default=False, description="Ignore case.")
    multiline: bool = Field(default=False, description="^ and $ match at every line.")
    dot_all: bool = Field(default=False, description="The dot matches newlines too.")

    @field_validator("pattern")
    @classmethod
    def _is_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as err:
            raise ValueError(f"not a regular expression of Python's re: {err}") from None
        return value


def rule(parameters: Parameters, truth: Any) -> str:
    text = parameters.pattern or truth_text(truth, NAME)
    if not text or len(text) > MAX_PATTERN_CHARS:
        raise BadGroundTruth(
            f"{NAME} needs an expression of 1 to {MAX_PATTERN_CHARS} characters: set the parameter pattern, or put it "
            f"into the row's ground_truth, which is {text[:80]!r}"
        )
    flags = {"i": parameters.ignore_case, "m": parameters.multiline, "s": parameters.dot_all}
    letters = "".join(letter for letter, is_on in flags.items() if is_on)
    return json.dumps({"regex": text, "flags": letters, "whole": parameters.match == "whole"})


async def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any, grade: Grade) -> list[Verdict]:
    wanted = rule(parameters, truth)
    unreadable = f"{NAME}: not a regular expression of Python's re: {json.loads(wanted)['regex'][:80]!r}"
    return [await verdict_on(_answer(text, parameters.where), wanted, grade, unreadable) for text in completions]


def _answer(completion: str, where: Where) -> str | None:
    """Return the answer at a place; only the whole completion has its chain of thought."""
    return final_answer.find(completion if where == "whole" else final_answer.spoken(completion), where)


async def verdict_on(answer: str | None, wanted: str, grade: Grade, unreadable: str) -> Verdict:
    """Return the verdict of a grader process; raises BadGroundTruth with a text for what it cannot read as a rule."""
    if answer is None or len(answer) > MAX_CHARS:
        return Verdict(0.0, {"timeout": 0.0, "too_long": float(answer is not None)})
    graded = await grade(wanted, answer)
    if graded is Graded.GOLD_UNREADABLE:
        raise BadGroundTruth(unreadable)
    return Verdict(float(graded is Graded.RIGHT), {"timeout": float(graded is Graded.EXHAUSTED), "too_long": 0.0})


REWARD = GradedReward(
    name=NAME,
    description="1 when a regular expression of Python's `re` matches",
    judge=judge,
    parameters=Parameters,
    grader="pattern",
    parts=("timeout", "too_long"),
    notes=f"without `pattern` the ground truth is the expression; an answer longer than {MAX_CHARS} characters is wrong",
    success=1.0,
)
