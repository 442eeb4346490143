"""The built-in rules against those of verl and TRL, on recorded cases."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards import gsm8k, math_answer, question_answer, tags
from penstock.reward_service.rewards.reward import Verdict

VECTORS = json.loads(gzip.decompress((Path(__file__).parents[2] / "data" / "conformance.json.gz").read_bytes()))


def recorded(case_id: str) -> dict:
    return next(case for case in VECTORS["cases"] if case["id"] == case_id)


@pytest.fixture
async def pool() -> AsyncIterator[GraderPool]:
    pool = GraderPool(1, cpu_s=20.0)
    yield pool
    await pool.close()


# Where Penstock reads the number in the text: a currency sign, no space, thousands, a trailing dot, 3.0, a fraction.
STRICT = {"#### $18", "#### 3.0", "####42", "#### 42.", "#### 1/2"}
FLEXIBLE = {"#### 1,234", "#### 3.0", "the answer is 42.", "#### 42.", "#### 1/2"}


@pytest.mark.parametrize(
    ("case_id", "output", "judge", "forgiven"),
    [
        ("verl/reward/gsm8k-strict", "scores", gsm8k.judge, STRICT),
        ("verl/reward/gsm8k-flexible", "scores", gsm8k.judge_flexible, FLEXIBLE),
        ("verl/reward/qa_em", "em", partial(question_answer.judge_exact, question_answer.Parameters()), set()),
        ("verl/reward/qa_em", "subem", partial(question_answer.judge_inside, question_answer.Parameters()), set()),
    ],
    ids=["gsm8k", "gsm8k_flexible", "qa_em", "qa_subem"],
)
def test_a_rule_equals_verls_or_accepts_more(
    case_id: str, output: str, judge: Callable[..., list[Verdict]], forgiven: set[str]
) -> None:
    """Right where verl gives 1; instead of its 0.1 for a wrong answer in tags there is the part has_answer."""
    case = recorded(case_id)
    for (text, truth), score in zip(case["inputs"]["pairs"], case["outputs"][output], strict=True):
        if truth == [""]:  # an empty truth accepts an empty answer there, and is refused here
            continue
        (verdict,) = judge((text,), truth)
        assert verdict.reward == float(score == 1.0 or text in forgiven), text
        assert case_id != "verl/reward/qa_em" or verdict.parts["has_answer"] == float(score > 0), text


def test_words_are_normalised_as_verl_does() -> None:
    case = recorded("verl/reward/normalize_answer")
    assert [question_answer.words(text) for text in case["inputs"]["strings"]] == case["outputs"]["normalized"]


def test_the_think_format_equals_trls() -> None:
    case = recorded("trl/reward/think_format")
    assert [v.reward for v in tags.judge_think(tuple(case["inputs"]["texts"]), None)] == case["outputs"]["rewards"]


# Where our math rule takes another side than the one recorded: it reads the last box alone, and by value.
_BY_VALUE = {"\\boxed{1,000}", "\\fbox{7}"}
_NO_BOX = {"no box 5", "\\boxed{\\frac{1}{2}", "The answer is $x \\in [1,2)$"}
OTHER_SIDE = {
    "verl/reward/math": _BY_VALUE | {"\\boxed{10\\%}"},  # 10 % is not 10 unless the truth has the sign too
    # texts are compared there
    "verl/reward/math_dapo-boxed": {
        *_BY_VALUE, "\\boxed{0.5}", "\\boxed{\\dfrac12}", "\\boxed{x=5}", "\\boxed{3\\sqrt2}",
        "\\boxed{90^\\circ}",
    },
    # two boxes are a set there, a percentage never the fraction, and text without a box is read too
    "math_verify/verify": {
        *_NO_BOX, "\\boxed{42} then \\boxed{43}", "\\boxed{50\\%}", "\\fbox{7}",
    },
    # prose as a truth is compared as words, there the sample is skipped
    "trl/reward/accuracy": {"not parseable words"},
}  # fmt: skip


@pytest.mark.parametrize("case_id", OTHER_SIDE)
async def test_math_equals_the_others_except_for_listed_texts(case_id: str, pool: GraderPool) -> None:
    case = recorded(case_id)
    verdicts = next(iter(case["outputs"].values()))
    for (text, truth), theirs in zip(case["inputs"]["pairs"], verdicts, strict=True):
        ours = (await math_answer.judge((text,), truth, pool.equal))[0].reward
        expected = theirs["acc"] if isinstance(theirs, dict) else theirs
        if truth in OTHER_SIDE[case_id]:
            assert (expected, ours) == (None, 0.0)
        else:
            assert ours == float(bool(expected) != (text in OTHER_SIDE[case_id])), text


async def test_the_answer_line_equals_verls(pool: GraderPool) -> None:
    """The same verdict on every recorded line: units, an assignment, thousands; no line and no box is wrong."""
    case, how = recorded("verl/reward/math_dapo-answer"), {"find": math_answer.on_last_line, "part": "has_answer"}
    for (text, truth), theirs in zip(case["inputs"]["pairs"], case["outputs"]["results"], strict=True):
        [ours] = await math_answer.judge((text,), truth, pool.equal, **how)
        assert ours.reward == float(theirs["acc"]), text
        assert ours.parts["has_answer"] == float(theirs["pred"] != "[INVALID]"), text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 1\nI was wrong.\n**Answer:** 2", "2"),
        ("Answer:\n42", "42"),
        ("The answer: \\boxed{7} of course", "7"),
        ("Answer: 12 square feet", "12 square feet"),
        ("Answer: north pole", "north pole"),
        ("so it is \\boxed{3}", "3"),
        ("Answer: ", None),
        ("my answers are 3", None),
    ],
)
def test_which_answer_a_line_gives(text: str, answer: str | None) -> None:
    """The last line counts, without emphasis and unit; a box on it counts, or without such a line the last box."""
    assert math_answer.on_last_line(text) == answer
