"""The built-in rewards, answer by answer: what is right, what is wrong, and why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards import exact_match, gsm8k, math_answer
from penstock.reward_service.rewards.parsing import latex
from penstock.reward_service.rewards.parsing.latex import read_number


@pytest.mark.parametrize("truth", [None, "", "no number", ["1", "2"], {"a": 1}, True, "#### none"])
def test_gsm8k_refuses_a_truth_that_is_no_number(truth: Any) -> None:
    """A ground truth that cannot be compared is an error of the data, not a wrong answer."""
    with pytest.raises(BadGroundTruth, match="gsm8k"):
        gsm8k.judge(("#### 42",), truth)


@pytest.mark.parametrize("truth", [None, "", "  ", [], [""], "\\boxed{", "1+" * 3000, "{" * 300])
async def test_math_refuses_a_truth_that_is_no_answer(truth: Any) -> None:
    """A row without an answer is an error of the data, not a wrong answer; no grader is called."""

    async def nobody(gold: str, answer: str) -> math_answer.Graded:
        raise AssertionError(f"{gold} and {answer} went to a grader")

    with pytest.raises(BadGroundTruth, match="math"):
        await math_answer.judge(("\\boxed{42}",), truth, nobody)


@pytest.mark.parametrize("truth", [None, [], {}, [None], True])
def test_exact_match_refuses_a_row_without_truth(truth: Any) -> None:
    with pytest.raises(BadGroundTruth, match="exact_match"):
        exact_match.judge(("x",), truth)


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(value: Any) -> None:
    written = f"{value.numerator}/{value.denominator}"
    assert read_number(written) == value
    assert gsm8k.judge((f"#### {written}",), written)[0].reward == 1.0
    tex = f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    assert math_answer.plainly_equal(tex, written) is True
    assert math_answer.plainly_equal(tex, f"{value.numerator + 1}/{value.denominator}") is False


@given(st.text(alphabet="\\abc{}$ 12", max_size=30).filter(lambda text: latex.plain_text(text) != ""))
def test_an_answer_equals_itself(answer: str) -> None:
    assert math_answer.plainly_equal(answer, answer) is True
