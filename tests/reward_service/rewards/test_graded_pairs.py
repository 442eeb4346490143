"""The table of pairs (tests/data/graded_pairs.tsv): no wrong answer is right, no right one wrong; laws of equality."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.examples import FACTOR

from penstock.console.evaluation_results import majority
from penstock.deploy.evaluation.prepare import BY_REWARD
from penstock.deploy.evaluation.same_answer import SameAnswer
from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_texts import GroupTexts
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.graders import math_grader
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.registry.built_in import BUILT_INS, Graders, scorer
from penstock.reward_service.rewards import math_answer, question_answer
from penstock.reward_service.rewards.math_answer import Grade, Graded
from penstock.reward_service.rewards.reward import AnswerReward, GradedReward

with (Path(__file__).parents[2] / "data" / "graded_pairs.tsv").open(encoding="utf-8", newline="") as lines:
    PAIRS = [
        (reward, json.loads(truth), json.loads(completion), int(verdict))
        for reward, truth, completion, verdict, _ in itertools.islice(
            csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), 1, None
        )
    ]
MATH = [
    (truth, text[7:-1], verdict)
    for reward, truth, text, verdict in PAIRS
    if reward == "math" and text.startswith("\\boxed{")
]


async def grade(truth: str, answer: str) -> Graded:
    """Grade in this process; a grader process does the same under limits."""
    gold = math_grader.read_gold(truth)
    if gold is None:
        return Graded.GOLD_UNREADABLE
    return Graded.RIGHT if math_grader.is_equal(gold, answer) else Graded.WRONG


async def test_every_pair_gets_its_verdict() -> None:
    assert len(PAIRS) >= 600
    differing = []
    for name, truth, completion, verdict in PAIRS:
        judge = BUILT_INS[name].bind(BUILT_INS[name].parameters())
        graded = isinstance(BUILT_INS[name], GradedReward)
        found = await judge((completion,), truth, grade=grade) if graded else judge((completion,), truth)
        if found[0].reward != verdict:
            differing.append((name, truth, completion, verdict))
    assert not differing, "\n".join(map(str, differing))


def equal(truth: str, answer: str) -> bool:
    gold = math_grader.read_gold(truth)
    return gold is not None and math_grader.is_equal(gold, answer)


# Names and percentages are forgiven in one direction.
VALUES = [pair for pair in MATH if not any(mark in pair[0] + pair[1] for mark in ("=", "%", "percent"))]
STRIDE = 1 if FACTOR > 1 else 5  # the suite has a part of them; `make fuzz` has all


def test_equality_is_reflexive_and_symmetric() -> None:
    values = VALUES[::STRIDE]
    readable = {text for truth, answer, _ in values for text in (truth, answer) if math_grader.read_gold(text)}
    assert len(readable) > 300 // STRIDE
    assert [text for text in sorted(readable) if not equal(text, text)] == []
    pairs = {(one, other) for one, other, _ in values if {one, other} <= readable}
    assert [(one, other) for one, other in sorted(pairs) if equal(one, other) != equal(other, one)] == []


@pytest.mark.parametrize(
    "number", ["2", "17", "1.5", "\\frac{3}{7}", "\\sqrt{3}", "x+1", "2\\pi", "4.5e33", "1.6e-19", "\\ln 3"]
)
def test_equality_changes_with_sign_exponent_and_size(number: str) -> None:
    assert equal(number, f"({number})^1")
    forms = ("-({0})", "({0})^2", "({0})^{{-1}}", "2\\cdot({0})", "({0})\\cdot(1+10^{{-12}})")
    others = [form.format(number) for form in forms]
    assert [other for other in others if equal(number, other) or equal(other, number)] == []


@pytest.mark.parametrize(
    "form",
    ["({0},{1})", "[{0},{1}]", "{0}-{1}", "{0}^{1}", "\\frac{{{0}}}{{{1}}}", "{0}<{1}", "x={0},y={1}", "{0}1_{1}"],
)
def test_equality_changes_with_order(form: str) -> None:
    for one, other in [("2", "3"), ("5", "8"), ("a", "b")][: 2 if "_" in form else 3]:
        assert not equal(form.format(one, other), form.format(other, one))
        assert equal(form.format(one, other), form.format(one, other))


async def nobody(truth: str, answer: str) -> Graded:
    raise AssertionError(f"{truth} and {answer} went to a grader")


NO_ANSWERS = (None, "", "  ", [], [""], {"answer": "1"}, "\\boxed{", "1+" * 3000, "{" * 300)


@pytest.mark.parametrize(
    ("truth", "grade"),
    [*((truth, nobody) for truth in NO_ANSWERS), *((truth, grade) for truth in ("\\frac{1}{", "x^{", "\\foo("))],
)
async def test_a_truth_that_cannot_be_read_is_refused_whatever_is_answered(truth: Any, grade: Grade) -> None:
    """No grader is asked about what is no answer."""
    for completion in ("", "\\boxed{42}", f"\\boxed{{{truth}}}"):
        with pytest.raises(BadGroundTruth, match="math"):
            await math_answer.judge((completion,), truth, grade)


async def test_a_truth_that_hangs_is_refused_after_one_limit() -> None:
    pool = GraderPool(1, cpu_s=0.5)
    try:
        with pytest.raises(BadGroundTruth, match="cannot be read"):
            await math_answer.judge(("\\boxed{42}",), "9^{9^{9}}", pool.equal)
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("truth", "relative", "answer", "score"),
    [
        ("4.5e33", 0.01, "4.51\\times 10^{33}", 1), ("4.5e33", 0.001, "4.51\\times 10^{33}", 0),
        ("\\sqrt2", 1e-6, "1.414214", 1), ("\\sqrt2", 0.0, "1.414214", 0),
        ({"answer": "1.6e-19", "relative": 0.05}, 0.0, "1.602e-19", 1),
        ({"answer": "1.6e-19", "relative": 0.05}, 0.0, "6.63e-34", 0), ({"answer": "1", "relative": None}, 0.0, "1", 1),
        ("(1,2)", 0.01, "(1.001,2)", 1), (["34"], 0.0, "34", 1), ('["1","2"]', 0.0, "2,1", 1), ("0", 0.5, "0.001", 0),
    ],
)  # fmt: skip
async def test_the_row_sets_the_relative_tolerance(truth: Any, relative: float, answer: str, score: int) -> None:
    parameters = math_answer.Parameters(relative=relative)
    (verdict,) = await math_answer.judge((f"\\boxed{{{answer}}}",), truth, grade, parameters=parameters)
    assert verdict.reward == score


@pytest.mark.parametrize(
    ("reward", "prompt", "completion", "score"),
    [
        ("qa_em", "Capital?", "The answer is Paris.", 1), ("qa_em", "Write <answer>.", "The answer is Paris.", 0),
        ("qa_em", "Capital?", "<answer>Rome</answer>\nParis", 0),
        ("gsm8k_flexible", "6*7?\n<think>\n", "so 42, but wait", 0),
        ("gsm8k_flexible", "6*7?\n<think>\n", "hm</think>42", 1),
    ],
)  # fmt: skip
async def test_a_prompt_decides_where_an_answer_is(reward: str, prompt: str, completion: str, score: int) -> None:
    truth = "Paris" if reward == "qa_em" else "42"
    built_in, pool = BUILT_INS[reward], GraderPool(0, cpu_s=1.0)
    made = scorer(built_in, built_in.parameters(), Graders(pool, pool, None))
    assert made is not None
    request = RewardRequest(name=reward, ground_truth=json.dumps(truth))
    (outcome,) = await made.score([GroupTexts("g", prompt, (completion,), ("stop",), request)], attempt=1)
    assert outcome.rewards == (score,)  # pyright: ignore[reportAttributeAccessIssue] no error


@pytest.mark.parametrize(
    ("answers", "correct"),
    [
        (["1000", "1{,}000", "1000.0", "999", "999"], (1, 1, 1, 0, 0)),
        (["1/2", "\\frac12", "0.5", "3", "3"], (1, 1, 1, 0, 0)),
        (["x+1", "1+x", "7"], (1, 1, 0)),
    ],
)
def test_equal_answers_are_one_vote(answers: list[str], correct: tuple[int, ...]) -> None:
    same, extract = SameAnswer(), BY_REWARD["math"][1]
    found = majority([extract(f"\\boxed{{{answer}}}") for answer in answers], [bool(value) for value in correct], same)
    same.close()
    assert found == 1.0


def test_a_reward_derived_from_the_base_class_compares_by_its_own_rule() -> None:
    class Colour(AnswerReward):
        def compare_answers(self, answer: str, truth: Any) -> float:
            return float(answer.casefold() == truth.casefold())

    colour = Colour(name="colour", description="1 when the colour is right", success=1.0)
    found = colour.judge(("<think>blue</think>The answer is RED", "<think>\\boxed{red}"), "red")
    assert [(verdict.reward, verdict.parts["has_answer"]) for verdict in found] == [(1.0, 1.0), (0.0, 0.0)]
    assert question_answer.words("") == ""
