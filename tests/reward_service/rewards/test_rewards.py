"""The built-in rewards, answer by answer: what is right, what is wrong, and why."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards import exact_match, format, gsm8k, math_answer
from penstock.reward_service.rewards.parsing import latex
from penstock.reward_service.rewards.parsing.number import read_number
from penstock.reward_service.rewards.reward import Verdict

# completion, ground truth, reward, has an answer, why
GSM8K: list[tuple[str, Any, float, float, str]] = [
    ("We add. #### 42", "42", 1, 1, "the plain case"),
    ("We add. #### 42", 42, 1, 1, "a data set may hold the number itself"),
    ("#### 42", "6 * 7 = 42\n#### 42", 1, 1, "a data set may hold the whole solution"),
    ("#### 1,234", "1234", 1, 1, "thousands separators are ornaments"),
    ("#### 1234", "1,234", 1, 1, "in the truth as well"),
    ("#### $18", "18", 1, 1, "a currency sign is one (verl: no answer)"),
    ("#### \\$18.00", "18", 1, 1, "also escaped, and cents are digits"),
    ("#### 18$", "18", 1, 1, "what follows the number is not looked at"),
    ("#### 50%", "50", 1, 1, "a percent sign is an ornament"),
    ("#### -7", "-7", 1, 1, "a sign counts"),
    ("#### −7", "-7", 1, 1, "a typographic minus is a minus"),
    ("#### -$7", "-7", 1, 1, "sign before currency"),
    ("#### 7", "-7", 0, 1, "and its absence too"),
    ("#### 3.0", "3", 1, 1, "numbers are compared, not texts (verl: wrong)"),
    ("#### 0.30", ".3", 1, 1, "exactly, as fractions"),
    ("#### 0.1", "0.10000000000000001", 0, 1, "no float rounds a wrong answer right"),
    ("#### 1/2", "0.5", 1, 1, "a fraction is a number (verl reads 1)"),
    ("#### 2/4", "1/2", 1, 1, "however it is written"),
    ("#### 1/0", "1", 0, 0, "a fraction by zero is no number"),
    ("#### 1e3", "1000", 1, 1, "an exponent is read"),
    ("#### 42.", "42", 1, 1, "the full stop of the sentence is not the number's (verl: wrong)"),
    ("####42", "42", 1, 1, "the blank may be missing (verl: no answer)"),
    ("####\n42", "42", 1, 1, "or be a line end"),
    ("#### 41 wait #### 42", "42", 1, 1, "the last answer counts"),
    ("#### 42 wait #### 41", "42", 0, 1, "also when it is the wrong one"),
    ("#### 42 ... #### none", "42", 1, 1, "a marker without number is no answer, the one before stands"),
    ("#### 42 apples", "42", 1, 1, "a unit may follow"),
    ("no marker 42", "42", 0, 0, "without the marker there is no answer"),
    ("the answer is 42.", "42", 0, 0, "the format is part of the task"),
    ("### 42", "42", 0, 0, "three are not four"),
    ("", "42", 0, 0, "nothing is wrong"),
    ("#### ", "42", 0, 0, "a marker alone is wrong"),
    ("#### forty-two", "42", 0, 0, "words are not read"),
    ("#### ٤٢", "42", 0, 0, "other scripts' digits are not read"),
    ("#### 42" + "0" * 500, "42", 0, 0, "a number of 500 digits is not read"),
    ("#### 42\n" + "blah " * 2000, "42", 1, 1, "the whole completion is searched (verl: its last 300 characters)"),
]

# completion, ground truth, reward, boxed, why
MATH: list[tuple[str, Any, float, float, str]] = [
    ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1, 1, "the plain case"),
    ("\\boxed{0.5}", "\\frac{1}{2}", 1, 1, "numbers are compared by value"),
    ("\\boxed{\\dfrac12}", "\\frac{1}{2}", 1, 1, "TeX's short forms are the same thing"),
    ("\\boxed{-\\frac{1}{2}}", "-0.5", 1, 1, "with a sign"),
    ("\\boxed{2/4}", "\\frac{1}{2}", 1, 1, "not reduced is still equal"),
    ("\\boxed{1.5}", "\\frac{3}{2}", 1, 1, "decimal and fraction"),
    ("\\boxed{0.3333}", "\\frac{1}{3}", 0, 1, "an approximation is not the value"),
    ("\\boxed{\\pi}", "3.14159", 0, 1, "nor the other way round"),
    ("\\boxed{42} then \\boxed{43}", "43", 1, 1, "the last box counts (math-verify alone: the set of both)"),
    ("\\boxed{43} then \\boxed{42}", "43", 0, 1, "also when it is the wrong one"),
    ("\\boxed{43} then \\boxed{42", "43", 1, 1, "a box that never closes is none"),
    ("\\boxed{\\frac{1}{2}", "\\frac{1}{2}", 0, 0, "so here there is no answer (math-verify alone repairs it)"),
    ("\\boxed{a \\boxed{7}}", "7", 1, 1, "of nested boxes the inner one"),
    ("\\boxed 7", "7", 1, 1, "a box without braces"),
    ("\\fbox{7}", "7", 1, 1, "a frame box is a box (verl: wrong)"),
    ("\\boxed{x=5}", "5", 1, 1, "naming the unknown is no mistake"),
    ("\\boxed{5}", "x=5", 1, 1, "nor leaving it out"),
    ("\\boxed{x=6}", "5", 0, 1, "the value decides"),
    ("\\boxed{1,000}", "1000", 1, 1, "thousands separators (verl: wrong)"),
    ("\\boxed{1{,}000}", "1000", 1, 1, "as TeX writes them"),
    ("\\boxed{1,2}", "12", 0, 1, "but a list is a list"),
    ("\\boxed{10\\%}", "10", 0, 1, "a percentage is not the number before its sign (as in math-verify)"),
    ("\\boxed{50\\%}", "0.5", 1, 1, "or be worked out"),
    ("\\boxed{50\\%}", "5\\%", 0, 1, "percent against percent are numbers"),
    ("\\boxed{90^\\circ}", "90", 1, 1, "degrees may be named"),
    ("\\boxed{\\$5}", "5", 1, 1, "money too"),
    ("\\boxed{5 \\text{ cm}}", "5", 1, 1, "and units"),
    ("\\boxed{3\\sqrt2}", "3\\sqrt{2}", 1, 1, "roots in short form"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1, 1, "equal by algebra"),
    ("\\boxed{x^2+2x+1}", "(x+1)^2", 1, 1, "equal by algebra"),
    ("\\boxed{x^2+2x}", "(x+1)^2", 0, 1, "not equal by algebra"),
    ("\\boxed{1+x}", "x+1", 1, 1, "order does not matter in a sum"),
    ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1, 1, "nor in a set"),
    ("\\boxed{(2,1)}", "(1,2)", 0, 1, "but in a pair"),
    ("\\boxed{\\left(1, 2\\right)}", "(1,2)", 1, 1, "spacing commands are no content"),
    ("\\boxed{x \\in [1,2)}", "[1,2)", 1, 1, "an interval"),
    ("\\boxed{3>x}", "x<3", 1, 1, "an inequality either way round"),
    ("\\boxed{\\text{(B)}}", "\\text{(B)}", 1, 1, "a choice"),
    ("\\boxed{B}", "\\text{(B)}", 1, 1, "in any dress"),
    ("\\boxed{C}", "\\text{(B)}", 0, 1, "but not another"),
    ("\\boxed{\\text{Yes}}", "yes", 1, 1, "a word in any case"),
    ("\\boxed{not positive}", "\\text{positive}", 0, 1, "words are compared whole"),
    ("no box 5", "5", 0, 0, "without a box there is no answer (math-verify alone finds the 5)"),
    ("$\\frac13$", "\\frac{1}{3}", 0, 0, "mathematics alone is no answer"),
    ("", "5", 0, 0, "nothing is wrong"),
    ("\\boxed{}", "5", 0, 1, "an empty box too"),
    ("\\boxed{" + "1+" * 3000 + "1}", "5", 0, 1, "nobody's answer has 6000 characters"),
    ("\\boxed{42}", "Thus \\boxed{42}.", 1, 1, "a data set may hold the whole solution"),
    ("\\boxed{42}", 42, 1, 1, "or the number itself"),
    ("\\boxed{\\frac{1}{0}}", "5", 0, 1, "a division by zero is not equal to anything"),
]


@pytest.fixture
async def grader() -> AsyncIterator[GraderPool]:
    """One real grader process for the whole table."""
    pool = GraderPool(1, cpu_s=20.0)
    yield pool
    await pool.close()


@pytest.mark.parametrize(("completion", "truth", "reward", "answered", "why"), GSM8K)
def test_gsm8k_verdicts(completion: str, truth: Any, reward: float, answered: float, why: str) -> None:
    """The number after the last #### decides, in the usual notations of numbers."""
    assert gsm8k.judge((completion,), truth) == [Verdict(reward, {"has_answer": answered})], why


async def test_math_verdicts(grader: GraderPool) -> None:
    """The last balanced box decides, by value."""
    wrong = []
    for completion, truth, reward, boxed, why in MATH:
        (verdict,) = await math_answer.judge((completion,), truth, grader.equal)
        if verdict != Verdict(reward, {"boxed": boxed, "timeout": 0.0}):
            wrong.append((completion[:60], truth, verdict, why))
    assert not wrong


@pytest.mark.parametrize("truth", [None, "", "no number", ["1", "2"], {"a": 1}, True, "#### none"])
def test_gsm8k_refuses_a_truth_that_is_no_number(truth: Any) -> None:
    """A ground truth that cannot be compared is an error of the data, not a wrong answer."""
    with pytest.raises(BadGroundTruth, match="gsm8k"):
        gsm8k.judge(("#### 42",), truth)


@pytest.mark.parametrize("truth", [None, "", "  ", ["1"], "\\boxed{", "1+" * 3000])
async def test_math_refuses_a_truth_that_is_no_answer(truth: Any) -> None:
    """A row without an answer is an error of the data, not a wrong answer; no grader is called."""

    async def nobody(gold: str, answer: str) -> math_answer.Graded:
        raise AssertionError(f"{gold} and {answer} went to a grader")

    with pytest.raises(BadGroundTruth, match="math"):
        await math_answer.judge(("\\boxed{42}",), truth, nobody)


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        ("1 2 3", "1 2 3", 1),
        ("\n 1 2 3 \n", "1 2 3 ", 1),
        ("1  2 3", "1 2 3", 0),
        ("Yes", "yes", 0),
        ("42", 42, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("", "", 1),
    ],
)
def test_exact_match_compares_without_the_white_space_around(completion: str, truth: Any, reward: float) -> None:
    """Only white space at both ends is ignored; a list of truths has alternatives."""
    assert exact_match.judge((completion,), truth) == [Verdict(reward)]


@pytest.mark.parametrize("truth", [None, [], {}, [None], True])
def test_exact_match_refuses_a_row_without_truth(truth: Any) -> None:
    """A missing truth is an error of the data."""
    with pytest.raises(BadGroundTruth, match="exact_match"):
        exact_match.judge(("x",), truth)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("<think></think><answer>b</answer>", 1),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think>b<answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("well <think>a</think><answer>b</answer>", 0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</think></answer>", 0),
        ("<think>a</think>", 0),
        ("<THINK>a</THINK><ANSWER>b</ANSWER>", 0),
        ("", 0),
    ],
)
def test_format_requires_each_tag_once_and_nothing_outside(completion: str, reward: float) -> None:
    """The form is thinking, then an answer that is not empty, and nothing else."""
    assert format.judge((completion,), None) == [Verdict(reward)]


@pytest.mark.parametrize(
    "attack",
    [
        "\\boxed{" * 200_000,
        "<think>" * 200_000,
        "#### " * 200_000,
        "\\boxed" + " " * 500_000,
        "####" + " " * 500_000,
        "#### 1" + ",1" * 200_000,
        "{" * 500_000 + "}" * 500_000,
        "\\frac" * 200_000,
    ],
)
def test_every_completion_is_judged_in_linear_time(attack: str) -> None:
    """Hostile completions of half a million characters are judged in linear time."""
    began = time.process_time()
    gsm8k.judge((attack,), "42")
    format.judge((attack,), None)
    latex.last_boxed(attack)
    latex.last_boxed("\\boxed{1} " + attack)
    assert time.process_time() - began < 5.0  # quadratic: minutes


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(value: Any) -> None:
    """A written fraction is read back as the same number, for gsm8k and math alike."""
    written = f"{value.numerator}/{value.denominator}"
    assert read_number(written) == value
    assert gsm8k.judge((f"#### {written}",), written)[0].reward == 1.0
    tex = f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    assert latex.plainly_equal(tex, written) is True
    assert latex.plainly_equal(tex, f"{value.numerator + 1}/{value.denominator}") is False


@given(st.text(max_size=200), st.text(alphabet="\\{}boxedfrac12,%$^. ", max_size=80))
def test_every_text_gets_a_finite_verdict(completion: str, latexish: str) -> None:
    """A reward gives a finite verdict on any text."""
    for text in (completion, latexish, f"\\boxed{{{latexish}}}", f"#### {latexish}"):
        assert gsm8k.judge((text,), "1")[0].reward in {0.0, 1.0}
        assert format.judge((text,), None)[0].reward in {0.0, 1.0}
        answer = latex.last_boxed(text)
        if answer is not None:
            assert latex.plainly_equal("1", answer) in {True, False, None}


@given(st.text(alphabet="\\abc{}$ 12", max_size=30).filter(lambda text: latex.normalise(text).strip() != ""))
def test_an_answer_equals_itself(answer: str) -> None:
    """Comparing an answer with itself never needs a grader."""
    assert latex.plainly_equal(answer, answer) is True
