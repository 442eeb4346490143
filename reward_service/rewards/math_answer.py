"""1 when the answer in the last ``\\boxed{}`` has the value of the ground truth.

Three comparisons, each only when the one before is undecided: the normalised texts are equal; both are
plain numbers and are compared as fractions; math-verify finds them equal (in a process of its own, see
`grader_pool`). math-verify is asymmetric and gets the ground truth first, and only the last box:
given two it would compare with the set of both. Of an equation the final side is compared, and its
numeric sides must be equal to it: `41 = 42` is wrong.

Part ``boxed`` is 1 if an answer was found. Part ``timeout`` is 1 for an answer that exhausted the
grader twice although the ground truth parsed: such an answer is wrong by definition, because the
completion alone is the cause. Every other failure of the grader is an error, not a verdict.

`math_flexible` also takes an answer in ``<answer>`` tags, after ``####`` or "the answer is", or the last number.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards import gsm8k
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.reward import GradedReward, Verdict, truth_text

NAME, FLEXIBLE = "math", "math_flexible"
MAX_ANSWER_CHARS = 2048  # bounds the input of a grader
Find = Callable[[str], str | None]  # a completion's answer, None if it has none
_DATA_SETS = (
    "math", "MATH", "math500", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
    "hendrycks/competition_math", "EleutherAI/hendrycks_math", "agentica-org/DeepScaleR-Preview-Dataset",
    "AI-MO/NuminaMath-CoT", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
    "numina_cn_k12", "numina_olympiads", "hiyouga/geometry3k", "amc23", "minerva_math", "olympiadbench",
)  # fmt: skip


class Graded(enum.Enum):
    RIGHT = enum.auto()
    WRONG = enum.auto()
    EXHAUSTED = enum.auto()  # this answer used up the CPU limit twice
    GOLD_UNREADABLE = enum.auto()  # the ground truth does not parse


Grade = Callable[[str, str], Awaitable[Graded]]  # (gold, answer)


async def judge(
    completions: tuple[str, ...], truth: Any, grade: Grade, *, find: Find = latex.last_boxed, part: str = "boxed"
) -> list[Verdict]:
    """Compare what ``find`` reads with the truth, a solution or an answer; the part named ``part`` is 1 if there was one."""
    gold = _gold(truth)
    return [await _verdict(find(completion), gold, grade, part) for completion in completions]


def _gold(truth: Any) -> str:
    text = truth_text(truth, NAME)
    gold = latex.last_boxed(text) if "\\boxed" in text or "\\fbox" in text else text
    if gold is None or not latex.normalise(gold) or len(gold) > MAX_ANSWER_CHARS:
        raise BadGroundTruth(f"math: the row's ground_truth must be an answer, got {text[:80]!r}")
    return gold


def anywhere(completion: str) -> str | None:
    """Return the answer of a completion whose prompt did not ask for a format."""
    for way in (latex.last_boxed, final_answer.in_tags, final_answer.after_hashes, final_answer.after_phrase):
        if (answer := way(completion)) is not None:
            return answer.strip("*$ ").rstrip(".")
    return gsm8k.last_number_text(completion)


async def _verdict(answer: str | None, gold: str, grade: Grade, part: str) -> Verdict:
    if answer is None:
        return Verdict(0.0, {part: 0.0, "timeout": 0.0})
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(0.0, {part: 1.0, "timeout": 0.0})
    graded = await _compare(gold, answer, grade)
    return Verdict(float(graded is Graded.RIGHT), {part: 1.0, "timeout": float(graded is Graded.EXHAUSTED)})


async def _compare(gold: str, answer: str, grade: Grade) -> Graded:
    """Compare an answer; of an equation the final side, and its numeric sides must not contradict it."""
    gold = latex.without_name(gold)
    if "=" in gold:
        return await _equal(gold, answer, grade)
    found = latex.read(answer)
    if not all(latex.is_rounding(number, found.value) for number in found.rounded):
        return Graded.WRONG
    for side in (found.value, *found.equal):
        graded = await _equal(gold, side, grade)
        if graded is not Graded.RIGHT:
            return graded
    return Graded.RIGHT


async def _equal(gold: str, answer: str, grade: Grade) -> Graded:
    same = latex.plainly_equal(gold, answer)
    if same is not None:
        return Graded.RIGHT if same else Graded.WRONG
    graded = await grade(gold, answer)
    if graded is Graded.GOLD_UNREADABLE:
        raise BadGroundTruth(f"math-verify cannot read the row's ground_truth {gold[:80]!r}")
    return graded


REWARD = GradedReward(
    name=NAME,
    description="1 when the last \\boxed{} has the value of the ground truth (math-verify)",
    judge=judge,
    grader="math",
    data_sources=_DATA_SETS,
    parts=("boxed", "timeout"),
    notes=f"an answer longer than {MAX_ANSWER_CHARS} characters is wrong",
    success=1.0,
)

FLEXIBLE_REWARD = GradedReward(
    name=FLEXIBLE,
    description="1 when the answer (boxed, in tags, after ####, after 'the answer is', or the last number) equals the ground truth",
    judge=partial(judge, find=anywhere, part="has_answer"),
    grader="math",
    data_sources=("math_reasoning",),
    parts=("has_answer", "timeout"),
    notes="compared as `math` compares",
    success=1.0,
)
