"""Verdicts that a careful human agrees with: answers, truths and scores, by the reward that compares them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.program_tests import tests_of_row
from penstock.reward_service.rewards import gsm8k, math_answer, numeric

INF, NAN = float("inf"), float("nan")

MATH: list[tuple[str, str, int]] = [  # the content of the box, the truth, the score
    ("41=42", "42", 0),
    ("1=2=42", "42", 0),
    ("x=41=42", "42", 0),
    ("1+1=42", "42", 0),
    ("2=42", "42", 0),
    ("0=42", "42", 0),
    ("42=41", "42", 0),
    ("\\frac{84}{3}=42", "42", 0),
    ("41=42", "x=42", 0),
    ("42=42", "42", 1),
    ("6\\cdot 7=42", "42", 1),
    ("\\frac{84}{2}=42", "42", 1),
    ("42=6\\cdot 7", "42", 1),
    ("x=42", "42", 1),
    ("42=x", "42", 1),
    ("x=y=42", "42", 1),
    ("f(2)=42", "42", 1),
    ("a+b=42", "42", 1),
    ("\\approx 42", "42", 1),
    ("x\\approx 42", "42", 1),
    ("≈42", "42", 1),
    ("\\simeq 42", "42", 1),
    ("\\pi\\approx 3.14", "3.14", 1),
    ("41.6\\approx 42", "42", 1),
    ("41\\approx 42", "42", 0),
    ("\\approx 41", "42", 0),
    ("\\approx 3.14", "\\pi", 0),
    ("42\\%", "42", 0),
    ("42\\text{ percent}", "42", 0),
    ("42\\%", "42\\%", 1),
    ("42", "42\\%", 1),
    ("0.42", "42\\%", 1),
    ("42\\%", "0.42", 1),
    ("42\\text{ percent}", "42\\%", 1),
    ("\\{1,2\\}", "(1,2)", 0),
    ("(1,2)", "\\{1,2\\}", 0),
    ("\\left\\{1,2\\right\\}", "(1,2)", 0),
    ("\\{2,1\\}", "\\{1,2\\}", 1),
    ("\\{1,2\\}", "1,2", 1),
    ("(1,2)", "(1,2)", 1),
    ("(2,1)", "(1,2)", 0),
    ("[1,2]", "(1,2)", 0),
    ("(1,2]", "(1,2)", 0),
    ("4 2", "42", 0),
    ("4\\,2", "42", 0),
    ("1\\,234", "1234", 1),
    ("1 234", "1234", 1),
    ("12 34", "1234", 0),
    ("3 1/2", "\\frac{7}{2}", 1),
    ("3 1/2", "31/2", 0),
    ("1,234", "1234", 1),
    ("12,34", "1234", 0),
    ("4_2", "42", 0),
    ("４２", "42", 0),
    ("42i", "42", 0),
    ("42, 43", "42", 0),
    ("42 \\text{ or } 43", "42", 0),
    ("\\pm 42", "42", 0),
    ("> 42", "42", 0),
    ("\\neq 42", "42", 0),
    ("\\frac{42}{0}", "42", 0),
    ("\\frac{0}{0}", "42", 0),
    ("\\infty", "1e999", 0),
    ("1e999", "9" * 309, 0),
    ("42\\text{ apples}", "42", 1),
]
GSM8K: list[tuple[str, str, int]] = [
    ("#### 42 41", "42", 0),
    ("#### 42 41", "41", 0),
    ("#### 42 or 43", "42", 0),
    ("#### 42, 43", "42", 0),
    ("#### 42-43", "42", 0),
    ("#### 42/0", "42", 0),
    ("#### 4_2", "4", 0),
    ("#### 1,2", "12", 0),
    ("#### 12,34", "1234", 0),
    ("#### 10:30", "10", 0),
    ("#### 5 feet 10 inches", "5", 0),
    ("#### 6*7", "6", 0),
    ("#### 1e999", "1000", 0),
    ("#### ٤٢", "42", 0),
    ("#### 41\n#### 42", "42", 1),
    ("#### 42\nbecause 6 times 7", "42", 1),
    ("#### 42 boxes of 7", "42", 1),
    ("#### 42 m2", "42", 1),
    ("#### **42**", "42", 1),
    ("#### 3 1/2", "3.5", 1),
    ("#### 1,234.50", "1234.5", 1),
    ("#### $42.", "42", 1),
]
NUMERIC: list[tuple[str, str, int]] = [
    ("\\boxed{42 41}", "42", 0),
    ("\\boxed{5 feet 10 inches}", "5", 0),
    ("\\boxed{4_2}", "4", 0),
    ("\\boxed{42 m}", "42", 1),
    ("\\boxed{3 1/2}", "3.5", 1),
    ("\\boxed{1/0}", "1", 0),
]
PRINTED: list[tuple[str, str, int]] = [  # what a program prints, the expected output
    ("1e999", "9" * 309, 0),
    ("1e999", "1" + "0" * 399, 0),
    ("1e999", "1e999", 1),
    ("1e400", "1E+400", 1),
    ("2e999", "1e999", 0),
    ("inf", "9" * 309, 0),
    ("-1e999", "-" + "9" * 309, 0),
    ("1.2345678901234567e19", "12345678901234567890", 0),
    ("123456789000.0", "123456789012", 0),
    ("1e16", "10000000000000001", 0),
    ("1e16", "10000000000000000", 1),
    ("10000000000000000.0", "10000000000000001", 0),
    ("1e3", "1000", 1),
    ("4.0", "4", 1),
    ("1.9999999999", "2", 1),
    ("1.9999", "2", 0),
    ("1000000000.5", "1000000000.4999999", 1),
    ("1e-9999", "0.0", 1),
    ("٣", "3", 0),
    ("1_000", "1000", 0),
    ("0x10", "16", 0),
    ("1+0j", "1", 0),
    ("1/2", "0.5", 0),
    ("50%", "50", 0),
    ("nan", "0", 0),
    ("-0", "0", 1),
]
RETURNED: list[tuple[Any, Any, int]] = [  # a function's result, the expected one
    (INF, 10**400, 0),
    (1e19, 10**19, 1),
    (1e19, 10**19 + 1, 0),
    (123456789000.0, 123456789012, 0),
    (3.0000000001, 3, 1),
    (10**400, 1e308, 0),
    (10**400, 10**400, 1),
    (NAN, NAN, 1),
    (NAN, 3, 0),
    (NAN, 3.0, 0),
    (INF, INF, 1),
    (INF, -INF, 0),
    (True, 1, 0),
    ("3", 3, 0),
]


async def test_boxes() -> None:
    """Equations contradict nothing, brackets and signs of percent count, signs of approximation do not."""
    pool = GraderPool(1, cpu_s=5.0)
    try:
        wrong = []
        for answer, truth, score in MATH:
            (verdict,) = await math_answer.judge((f"so \\boxed{{{answer}}}",), truth, pool.for_group())
            if verdict.reward != score:
                wrong.append((answer, truth, verdict))
        assert not wrong
    finally:
        await pool.close()


@pytest.mark.parametrize(("answer", "truth", "score"), GSM8K)
def test_hashes(answer: str, truth: str, score: int) -> None:
    assert gsm8k.judge((answer,), truth)[0].reward == score


@pytest.mark.parametrize(("answer", "truth", "score"), NUMERIC)
def test_quantities(answer: str, truth: str, score: int) -> None:
    assert numeric.judge(numeric.Parameters(), (answer,), truth)[0].reward == score


@pytest.mark.parametrize(("printed", "expected", "same"), PRINTED)
def test_outputs(printed: str, expected: str, same: int) -> None:
    """An expected integer is matched exactly, whatever its size; numbers have ASCII digits."""
    assert tests_of_row.same_output(printed, expected) is bool(same)


@pytest.mark.parametrize(("result", "expected", "same"), RETURNED)
def test_results(result: Any, expected: Any, same: int) -> None:
    assert tests_of_row.same_result(result, expected) is bool(same)


def test_the_table_is_large() -> None:
    tables: list[list[tuple[Any, Any, int]]] = [[*MATH], [*GSM8K], [*NUMERIC], [*PRINTED], RETURNED]
    assert all(len({repr(row) for row in table}) == len(table) for table in tables)
    scores = [row[2] for table in tables for row in table]
    assert len(scores) >= 80
    assert min(sum(scores), len(scores) - sum(scores)) >= 40
