"""Our gsm8k and math against the verdicts of verl, TRL and math-verify on the same texts.

Differences are listed with a reason; any other difference is a failure.
TRL skips a row whose truth is prose (``None``); Penstock compares it as words, so no reward is given either.
verl's math_dapo (range -1, 1; text comparison only) and its flexible gsm8k rule are not followed here.
The vectors were recorded by running those libraries (verl 0.9.1, TRL 1.16.0, math-verify 0.9.0).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards import gsm8k, math_answer

CASES = json.loads((Path(__file__).parents[2] / "data" / "reward_conformance.json").read_text())

# (case, completion): why we give another verdict
OURS: dict[tuple[str, str], str] = {
    ("verl/reward/gsm8k-strict", "#### $18"): "a currency sign is an ornament",
    ("verl/reward/gsm8k-strict", "#### 3.0"): "numbers are compared, not texts",
    ("verl/reward/gsm8k-strict", "####42"): "the blank may be missing",
    ("verl/reward/gsm8k-strict", "#### 42."): "the full stop is not the number's",
    ("verl/reward/gsm8k-strict", "#### 1/2"): "a fraction is a number",
    ("verl/reward/math", "\\boxed{1,000}"): "thousands separators are ornaments",
    ("verl/reward/math", "\\boxed{10\\%}"): "a percentage is not the number before its sign, unless the truth has one",
    ("verl/reward/math", "\\fbox{7}"): "a frame box is a box",
    ("math_verify/verify", "\\boxed{42} then \\boxed{43}"): "the last box counts, not the set of all",
    ("math_verify/verify", "\\boxed{50\\%}"): "a percentage equals the fraction it stands for",
    ("math_verify/verify", "no box 5"): "without a box there is no answer",
    ("math_verify/verify", "The answer is $x \\in [1,2)$"): "without a box there is no answer",
    ("math_verify/verify", "\\fbox{7}"): "a frame box is a box",
    ("math_verify/verify", "\\boxed{\\frac{1}{2}"): "a box that never closes is none",
}


@pytest.fixture
async def grader() -> AsyncIterator[GraderPool]:
    pool = GraderPool(1, cpu_s=20.0)
    yield pool
    await pool.close()


def _differ(case: dict[str, Any], rewards: list[float]) -> set[str]:
    """Return the completions whose verdict is not the recorded one; a partial score there counts as wrong."""
    recorded = [float(value is not None and value == 1.0) for value in case["outputs"]]
    return {pair[0] for pair, theirs, ours in zip(case["pairs"], recorded, rewards, strict=True) if theirs != ours}


def test_gsm8k_agrees_with_verl_but_for_the_listed_answers() -> None:
    case = CASES["verl/reward/gsm8k-strict"]
    rewards = [gsm8k.judge((text,), truth)[0].reward for text, truth in case["pairs"]]
    assert _differ(case, rewards) == {text for name, text in OURS if name == "verl/reward/gsm8k-strict"}


@pytest.mark.parametrize("name", ["verl/reward/math", "math_verify/verify", "trl/reward/accuracy"])
async def test_math_agrees_but_for_the_listed_answers(name: str, grader: GraderPool) -> None:
    """Three public verifiers, and the texts on which ours differs on purpose."""
    case = CASES[name]
    rewards = []
    for text, truth in case["pairs"]:
        try:
            rewards.append((await math_answer.judge((text,), truth, grader.equal))[0].reward)
        except BadGroundTruth:
            rewards.append(0.0)
    assert _differ(case, rewards) == {text for case_name, text in OURS if case_name == name}
