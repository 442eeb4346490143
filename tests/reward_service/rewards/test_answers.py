"""The table of answers (tests/data/answers.jsonl): verdicts of every built-in reward, each with its reason."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.registry.built_in import BUILT_INS, Graders, scorer
from penstock.reward_service.rewards import choice, classification, exact_match, gsm8k, math_answer, numeric, tags
from penstock.reward_service.rewards.math_answer import Graded
from penstock.reward_service.rewards.parsing import latex, quantity
from penstock.reward_service.scores import GroupScores

TABLE: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parents[2] / "data" / "answers.jsonl").read_text().splitlines()
]


@pytest.fixture
async def graders() -> AsyncIterator[Graders]:
    math, patterns = GraderPool(1, cpu_s=2.0), GraderPool(1, cpu_s=0.3, kind="pattern")
    yield Graders(math, patterns, None)
    await math.close()
    await patterns.close()


def test_the_table_is_large_and_gives_reasons() -> None:
    """At least 200 different answers, each with its reason, for every built-in reward that reads an answer's text."""
    assert len({json.dumps(row, sort_keys=True) for row in TABLE}) == len(TABLE) >= 200
    assert all(row["why"] for row in TABLE)
    assert {row["reward"] for row in TABLE} == BUILT_INS.keys() - {"code", "environment", "ifeval"}
    assert all(Counter(row["score"] > 0 for row in TABLE).values())


async def test_every_answer_gets_its_verdict(graders: Graders) -> None:
    """Every answer gets its listed verdict; one that exhausts a grader takes bounded time and is wrong."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in TABLE:
        groups.setdefault(json.dumps([row["reward"], row.get("parameters", {})]), []).append(row)
    found = await asyncio.gather(*(_differing(*json.loads(key), rows, graders) for key, rows in groups.items()))
    wrong = [one for some in found for one in some]
    assert not wrong, "\n".join(map(str, wrong))


async def _differing(
    name: str, given: dict[str, Any], rows: list[dict[str, Any]], graders: Graders
) -> list[tuple[Any, ...]]:
    built_in = BUILT_INS[name]
    parameters = built_in.parameters.model_validate_json(json.dumps(given), strict=True)
    made = scorer(built_in, parameters, graders)
    assert made is not None
    outcomes = await made.score([_group(name, row) for row in rows], attempt=1)
    for one in outcomes:
        assert not isinstance(one, GroupScores) or one.parts.keys() == set(built_in.parts), name
    found = [_first(outcome) if isinstance(outcome, GroupScores) else (repr(outcome), {}) for outcome in outcomes]
    return [
        (name, given, row, f"got {one}")
        for row, one in zip(rows, found, strict=True)
        if one != (row["score"], row.get("parts", one[1]))
    ]


def _first(scores: GroupScores) -> tuple[float, dict[str, float]]:
    return scores.rewards[0], {part: values[0] for part, values in scores.parts.items()}


def _group(name: str, row: dict[str, Any]) -> GroupTexts:
    truth = None if row["truth"] is None else json.dumps(row["truth"])
    return GroupTexts("g", "", (row["answer"],), ("stop",), RewardRequest(name=name, ground_truth=truth))


HOSTILE = {
    "boxes": "\\boxed{" * 25_000,
    "digits": "9" * 125_000,
    "commas": "1,234" * 25_000,
    "fractions": "1/" * 50_000,
    "signs": "-" * 125_000,
    "spaces": " " * 125_000,
    "tabs after a phrase": "the answer is" + "\t*" * 50_000,
    "phrases": "answer is answer: " * 10_000,
    "Chinese phrases": "答案是" * 37_000,
    "hashes": "#### " * 25_000,
    "spaces after hashes": "####" + " " * 125_000,
    "thousands after hashes": "#### 1" + ",1" * 60_000,
    "spaces in a box": "\\boxed{1} \\boxed" + " " * 125_000,
    "braces": "{" * 60_000 + "}" * 60_000,
    "tags": "<think>" * 17_000 + "<answer>" * 15_000,
    "closing tags": "</answer>" * 15_000,
    "fences": "```" * 37_000,
    "letters": "A) " * 37_000,
    "labels": "not positive " * 10_000,
    "superscripts": "⁹" * 125_000,
    "ligatures": "ﷺ" * 50_000,
    "frac": "\\frac" * 25_000,
    "text": "\\text{" * 20_000,
    "powers": "10^" * 37_000,
    "times": "1 × 10^" * 17_000,
    "lines": "\n" * 125_000,
}
PURE = {name: one for name, one in BUILT_INS.items() if name not in {"code", "length", "overlong", "environment"}}
INSTRUCTIONS = tomllib.loads((Path(__file__).parents[2] / "data" / "ifeval.toml").read_text())
SET = {
    "classification": {"labels": ["positive", "negative"], "where": "whole"},
    "multiple_choice": {"where": "whole"},
    "numeric": {"where": "last_number"},
    "qa_f1": {"where": "whole"},
}


def _truth(name: str) -> str:
    given = {
        key: row["given"]
        for key, row in INSTRUCTIONS.items()
        if ":" in key and not key.startswith(("language:", "change_case:english"))
    }
    every = json.dumps({"instruction_id_list": [*given], "kwargs": [*given.values()]})
    return {"multiple_choice": '"B"', "classification": '"positive"', "json_schema": "{}", "ifeval": every}.get(
        name, '"42"'
    )


async def _grade(gold: str, answer: str) -> Graded:
    """Replace a grader process, whose limits have tests of their own."""
    return Graded.WRONG


@pytest.mark.parametrize("attack", HOSTILE)
async def test_no_completion_costs_a_reward_more_than_its_length(attack: str) -> None:
    """A hundred thousand hostile characters cost every reward less than a CPU second in the service's own process."""
    slow = {}
    pool = cast("GraderPool", SimpleNamespace(for_group=lambda: _grade))
    for name, built_in in PURE.items():
        for chosen in ({}, SET.get(name, {})):
            parameters = built_in.parameters.model_validate_json(json.dumps(chosen))
            made = scorer(built_in, parameters, Graders(pool, pool, None))
            assert made is not None
            row = {"answer": HOSTILE[attack], "truth": json.loads(_truth(name))}
            began = time.process_time()
            (outcome,) = await made.score([_group(name, row)], attempt=1)
            slow[name] = max(slow.get(name, 0.0), time.process_time() - began)
            assert isinstance(outcome, GroupScores), (name, outcome)
    assert {name: cost for name, cost in slow.items() if cost > 1.0} == {}


@given(st.text(max_size=60), st.text(alphabet="0123456789,./%$ -+^x×{}\\fracboxed()eE½⁵", max_size=40))
def test_every_text_gets_a_verdict_on_numbers_letters_and_labels(text: str, number: str) -> None:
    for completion in (text, number, f"<answer>{number}</answer>", f"The answer is {number}", f"\\boxed{{{text}}}"):
        for judge in (gsm8k.judge, tags.judge_format):
            assert judge((completion,), "1")[0].reward in {0.0, 1.0}
        assert math_answer.plainly_equal("1", completion) in {True, False, None}
        converted = numeric.Parameters(units="convert", percent="value", where="last_number")
        for parameters in (numeric.Parameters(), converted):
            assert numeric.judge(parameters, (completion,), "50% ")[0].reward in {0.0, 1.0}
        assert choice.judge(choice.Parameters(), (completion,), "B")[0].reward in {0.0, 1.0}
        labels = classification.Parameters(labels=("yes", "no"))
        assert classification.judge(labels, (completion,), "yes")[0].reward in {0.0, 1.0}


@pytest.mark.parametrize(
    ("judge", "truths"),
    [
        (gsm8k.judge, [None, "", "no number", ["1", "2"], {"a": 1}, True, "#### none"]),
        (exact_match.judge, [None, [], {}, [None], True]),
    ],
)
def test_a_truth_that_no_answer_can_equal_is_refused(judge: Callable[..., Any], truths: list[Any]) -> None:
    for truth in truths:
        with pytest.raises(BadGroundTruth, match=judge.__module__.rpartition(".")[2]):
            judge(("#### 42",), truth)


@given(st.text(alphabet="\\abc{}$ 12", max_size=30).filter(lambda text: latex.plain_text(text) != ""))
def test_an_answer_equals_itself(answer: str) -> None:
    assert math_answer.plainly_equal(answer, answer) is True


@given(
    st.fractions(max_denominator=10**6), st.sampled_from(["{0}/{1}", "\\frac{{{0}}}{{{1}}}", "$\\dfrac{{{0}}}{{{1}}}$"])
)
def test_a_fraction_is_read_in_every_spelling(value: Fraction, form: str) -> None:
    written, plain = form.format(value.numerator, value.denominator), f"{value.numerator}/{value.denominator}"
    read = quantity.read(written)
    assert read is not None
    assert read.number == latex.read_number(plain) == value
    assert gsm8k.judge((f"#### {plain}",), plain)[0].reward == 1.0
    assert math_answer.plainly_equal(written, plain) is True
    assert math_answer.plainly_equal(written, f"{value.numerator + 1}/{value.denominator}") is False


@pytest.mark.parametrize("truth", ["5 m^2", "5 m²", "50000 cm²"])
def test_a_superscript_of_a_unit_is_its_power(truth: str) -> None:
    answers = ("\\boxed{5 m²}", "\\boxed{50000 cm²}", "\\boxed{5 m³}", "\\boxed{5 m}")
    verdicts = numeric.judge(numeric.Parameters(units="convert"), answers, truth)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0]
