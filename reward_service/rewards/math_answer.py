"""1 when the answer in the last ``\\boxed{}`` has the value of the ground truth.

A chain in ``<think>`` is not read. Two numbers are compared as fractions, prose by its words if the truth is prose,
everything else by a grader process (`graders/math_grader.py`), exactly or within the relative tolerance of the
parameters or of the row (``{"answer": "4.5e33", "relative": 0.01}``). Of an equation the final side is compared; its
numeric sides must equal it: `41 = 42` is wrong. The name of a value may be left out (`x = 5`, `f(x) = 2x + 1`), a
side of an equation not (`y = 2x + 1`). Units are compared when both have one; bases always, and the case of letters,
but not of a constant (`+ C`).

Part ``boxed`` is 1 if an answer was found, ``timeout`` for an answer that exhausted the grader twice: it is wrong, as
the completion alone is the cause. A truth that the parser cannot read equals its own text alone; one that is empty or
does not close its brackets, or exhausts the grader, is BadGroundTruth, whatever the answers are.

`answer_line` takes the last line that begins its answer with ``Answer:``, as DAPO's prompts ask and verl's `math_dapo`
reads (it compares texts), or the box on that line. `math_flexible` also takes an answer in ``<answer>`` tags, after
``####`` or "the answer is", or the last number.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards import gsm8k
from penstock.reward_service.rewards.parsing import final_answer, latex, notation
from penstock.reward_service.rewards.reward import GradedReward, Verdict, truth_text

NAME, FLEXIBLE, LINE = "math", "math_flexible", "answer_line"
MAX_ANSWER_CHARS = 2048  # bounds the input of a grader
MAX_DEPTH = 40  # of a truth's brackets
Find = Callable[[str], str | None]  # a completion's answer, None if it has none
_DATA_SETS = (
    "math", "MATH", "math500", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
    "hendrycks/competition_math", "EleutherAI/hendrycks_math", "agentica-org/DeepScaleR-Preview-Dataset",
    "AI-MO/NuminaMath-CoT", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc",
    "numina_cn_k12", "numina_olympiads", "hiyouga/geometry3k", "amc23", "minerva_math", "olympiadbench",
)  # fmt: skip
_LINE_DATA_SETS = (
    "math_dapo", "math_dapo_reasoning", "BytedTsinghua-SIA/DAPO-Math-17k", "aime", "aime24", "aime2024", "aime2025",
    "aime25", "aime_2024", "aime_2025", "HuggingFaceH4/aime_2024",
)  # fmt: skip
_ANSWER_LINE = re.compile(r"\banswer\s*:[ \t*]*\n?([^\n]+)", re.IGNORECASE)


class Graded(enum.Enum):
    RIGHT = enum.auto()
    WRONG = enum.auto()
    EXHAUSTED = enum.auto()  # this answer used up the CPU limit twice
    GOLD_UNREADABLE = enum.auto()  # the ground truth does not parse


Grade = Callable[[str, str], Awaitable[Graded]]  # (gold, answer)


class Parameters(Section):
    relative: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Largest allowed difference of constants as a share of the truth; 0: exact.",
    )


async def judge(
    completions: tuple[str, ...],
    truth: Any,
    grade: Grade,
    *,
    find: Find = latex.last_boxed,
    part: str = "boxed",
    parameters: Parameters = Parameters(),  # noqa: B008 frozen
) -> list[Verdict]:
    """Compare what ``find`` reads with the truth, a solution or an answer; the part ``part`` is 1 if there was one."""
    gold = _gold(truth, parameters.relative)
    if gold.needs_grader and await grade(gold.to_grader, "") in {Graded.GOLD_UNREADABLE, Graded.EXHAUSTED}:
        raise BadGroundTruth(
            f"math: the row's ground_truth cannot be read as mathematics: {gold.text[:80]!r}; correct the row"
        )
    return [await _verdict(find(final_answer.spoken(completion)), gold, grade, part) for completion in completions]


async def judge_with(
    parameters: Parameters, completions: tuple[str, ...], truth: Any, grade: Grade, **how: Any
) -> list[Verdict]:
    return await judge(completions, truth, grade, parameters=parameters, **how)


class _Gold(NamedTuple):
    text: str
    relative: float
    label: str = ""  # the letter of a choice that is the truth, or stands before it

    @property
    def to_grader(self) -> str:
        return f"{self.text}\t{self.relative!r}" if self.relative else self.text

    @property
    def needs_grader(self) -> bool:
        return not latex.is_prose(self.text) and notation.plain_value(notation.rewrite(self.text)) is None


def _gold(truth: Any, relative: float) -> _Gold:
    match truth:
        case {"answer": answer, "relative": int() | float() | None as own} if len(truth) == 2:
            truth, relative = answer, relative if own is None else float(own)
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    text = truth_text(", ".join(truth) if _are_texts(truth) else truth, NAME)
    if text.lstrip().startswith('["') and _are_texts(listed := _listed(text)):
        text = ", ".join(listed)
    gold = latex.last_boxed(text) if "\\boxed" in text or "\\fbox" in text else text
    if gold is None or not latex.plain_text(gold) or len(gold) > MAX_ANSWER_CHARS or not 0.0 <= relative < 1.0:
        raise BadGroundTruth(f"math: the row's ground_truth must be an answer, got {text[:80]!r}")
    gold = gold.replace("\t", " ")
    label, gold = latex.label(gold) or latex.choice(gold), latex.without_label(gold)
    if not latex.is_shallow(gold, MAX_DEPTH):
        raise BadGroundTruth(f"math: the row's ground_truth has brackets nested deeper than {MAX_DEPTH}: {gold[:80]!r}")
    return _Gold(gold, relative, label)


def _are_texts(values: Any) -> bool:
    is_list = isinstance(values, list) and len(values) > 0
    return is_list and all(isinstance(value, str) and value.strip() for value in values)


def _listed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


_WHY = r",\s(?:as|so|because|since|which)\s"
_MARKED = re.compile(
    r"\s*(?:\*\*(?P<bold>[^*]+)\*\*|\$(?P<formula>[^$]+)\$|\\\((?P<inline>.+?)\\\))"
    rf"(?=[.!]*\s*(?:\Z|{_WHY}))"
)
_BOLD_END = re.compile(r"\*\*([^*\n]{1,200})\*\*[\s.!。]*\Z")
_REASON = re.compile(rf"{_WHY}.*", re.DOTALL)


def anywhere(completion: str) -> str | None:
    """Return the answer of a completion whose prompt did not ask for a format."""
    for way in (latex.last_boxed, final_answer.in_tags, final_answer.after_hashes, final_answer.after_phrase):
        if (answer := way(completion)) is not None:
            marked = _MARKED.match(answer)
            answer = marked[marked.lastgroup or 0] if marked else _REASON.sub("", answer)
            return answer.strip("*$ ").rstrip("*$ .")
    bold = _BOLD_END.search(completion)
    return bold[1].strip() if bold else gsm8k.last_number_text(completion)


def on_last_line(text: str) -> str | None:
    """Return the answer on the last ``Answer:`` line, else the one in the last box, else None."""
    line = None
    for match in _ANSWER_LINE.finditer(text):
        line = match[1].strip().strip("*").strip()
    boxed = latex.last_boxed(text if line is None else line)
    return boxed if boxed is not None else line or None


async def _verdict(answer: str | None, gold: _Gold, grade: Grade, part: str) -> Verdict:
    if answer is None:
        return Verdict(0.0, {part: 0.0, "timeout": 0.0})
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(0.0, {part: 1.0, "timeout": 0.0})
    graded = await _compare(gold, answer, grade)
    return Verdict(float(graded is Graded.RIGHT), {part: 1.0, "timeout": float(graded is Graded.EXHAUSTED)})


async def _compare(gold: _Gold, answer: str, grade: Grade) -> Graded:
    """Compare an answer; of an equation the final side, and its numeric sides must not contradict it."""
    if latex.without_name(gold.text) == gold.text and "=" in gold.text:
        return await _equal(gold, answer, grade)
    if gold.label and latex.choice(answer) == gold.label:
        return Graded.RIGHT
    if gold.label and (label := latex.label(answer)):
        if label != gold.label or latex.choice(gold.text):
            others = latex.OTHER_CHOICE.search(latex.plain_text(latex.without_label(answer)))  # (A) or (B)
            return Graded.RIGHT if label == gold.label and others is None else Graded.WRONG
        answer = latex.without_label(answer)
    equation = latex.read(answer if latex.is_prose(gold.text) else latex.without_label(answer))
    if not all(latex.is_rounding(number, equation.value) for number in equation.rounded):
        return Graded.WRONG
    named = gold.text != latex.without_name(gold.text) and equation.names
    if named and named.isdisjoint(latex.read(gold.text).names):
        return Graded.WRONG  # neither y = 5 nor -x = 5 is an answer to x = 5
    gold = gold._replace(text=latex.without_name(gold.text))
    is_final = not equation.exact or await _equal(gold, equation.value, grade) is Graded.RIGHT
    if not is_final and await _rounds(equation, grade):  # \sqrt{5} \approx 2.236: the exact side is the answer
        equation = equation._replace(value=equation.exact)
    for side in (equation.value, *equation.equal):
        graded = await _equal(gold, side, grade)
        if graded is not Graded.RIGHT:
            return graded
    return Graded.RIGHT


async def _rounds(equation: latex.Equation, grade: Grade) -> bool:
    """Return True if the final side is the exact side before it, rounded to the final side's digits.

    A grader compares with the final side, a plain number: an exact side that cannot be read is the answer's failure.
    """
    number = latex.read_number(equation.value)
    if not number or latex.read_number(equation.exact) is not None or len(equation.exact) > MAX_ANSWER_CHARS:
        return False
    digits = len(equation.value.strip().rstrip("%").partition(".")[2])
    half = 1 / (2 * 10**digits * abs(number))
    return half < 1 and await _equal(_Gold(equation.value, float(half)), equation.exact, grade) is Graded.RIGHT


async def _equal(gold: _Gold, answer: str, grade: Grade) -> Graded:
    same = plainly_equal(gold.text, answer, gold.relative)
    if same is not None:
        return Graded.RIGHT if same else Graded.WRONG
    graded = await grade(gold.to_grader, answer)
    if graded is Graded.GOLD_UNREADABLE:
        raise BadGroundTruth(
            f"math: the row's ground_truth cannot be read as mathematics: {gold.text[:80]!r}; correct the row"
        )
    return graded


def plainly_equal(gold: str, answer: str, relative: float = 0.0) -> bool | None:
    """Return True or False for prose, two plain numbers, or two answers of one notation; None if it takes algebra.

    A percentage equals the fraction it denotes, and the same number without the sign if it is the truth that has one.
    Only a truth that is prose is compared by words.
    """
    if not answer.strip():
        return False
    if latex.is_prose(gold):
        return latex.said(gold) == latex.said(answer)
    wanted_text, text = notation.rewrite(gold), notation.rewrite(answer)
    if text in (wanted_text, f"\\text{{{wanted_text}}}"):
        return True
    wanted, value = notation.plain_value(wanted_text), notation.plain_value(text)
    if wanted is None or value is None:
        return None
    allowed = Fraction(relative)
    number = value.number / 100 if wanted.is_percent < value.is_percent else value.number
    truths = {wanted.number, wanted.number / 100} if wanted.is_percent > value.is_percent else {wanted.number}
    return any(abs(number - truth) <= allowed * abs(truth) for truth in truths)


REWARD = GradedReward(
    name=NAME,
    description="1 when the last \\boxed{} has the value of the ground truth (math-verify)",
    judge=judge_with,
    parameters=Parameters,
    grader="math",
    reads="answer",
    data_sources=_DATA_SETS,
    parts=("boxed", "timeout"),
    notes="exact unless `relative` is set; units are compared when both have one, bases always; `y = 2x + 1` is not "
    f"`2x + 1`; an answer longer than {MAX_ANSWER_CHARS} characters is wrong",
    success=1.0,
)

FLEXIBLE_REWARD = replace(
    REWARD,
    name=FLEXIBLE,
    description="1 when the answer (boxed, in tags, after ####, after 'the answer is', or the last number) equals the "
    "ground truth",
    judge=partial(judge_with, find=anywhere, part="has_answer"),
    data_sources=("math_reasoning",),
    parts=("has_answer", "timeout"),
    notes="compared as `math` compares",
)

LINE_REWARD = replace(
    FLEXIBLE_REWARD,
    name=LINE,
    description="1 when the answer on the last line 'Answer: ...', else in the last \\boxed{}, equals the ground truth",
    judge=partial(judge_with, find=on_last_line, part="has_answer"),
    data_sources=_LINE_DATA_SETS,
)
