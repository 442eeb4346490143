"""A run stops when trainer and engine differ, and only then."""

from __future__ import annotations

import math

import pytest

from penstock.trainer.algorithm.mismatch import Mismatch
from penstock.trainer.algorithm.stop_checks import MIN_TOKENS, EngineCheck
from penstock.trainer.errors import EngineMismatch


def seen(mean_abs: float, num_tokens: int = 1000) -> Mismatch:
    return Mismatch(num_tokens=num_tokens, mean_abs=mean_abs, max_abs=10 * mean_abs, kl_k1=0.0, kl_k3=mean_abs**2 / 2)


def check_after_start(limit: float | None = 0.1, max_violations: int = 3) -> EngineCheck:
    check = EngineCheck(limit=limit, max_violations=max_violations)
    check.check(seen(0.01), 0)
    return check


@pytest.mark.parametrize("mean_abs", [0.11, 5.0, math.inf, math.nan])
def test_a_violation_at_the_first_comparison_stops_the_run(mean_abs: float):
    with pytest.raises(EngineMismatch, match=r"version 4.*at the first comparison.*temperature.*dtype.*tokenizer"):
        EngineCheck(limit=0.1, max_violations=3).check(seen(mean_abs), 4)


def test_later_violations_must_follow_one_another():
    """A comparison within the limit resets the count; three violations in a row stop the run."""
    check = check_after_start()
    for mean_abs in (0.2, 0.3, 0.05, 0.2, 0.3):
        check.check(seen(mean_abs), 1)
    with pytest.raises(EngineMismatch, match="in 3 comparisons in a row"):
        check.check(seen(0.2), 9)


def test_steps_without_fresh_tokens_are_no_comparisons():
    """Stale tokens, or too few fresh ones, neither reset nor raise the count; the steps since the last comparison are counted."""
    check = check_after_start()
    for found in (seen(0.2), None, seen(0.0, MIN_TOKENS - 1), seen(0.2), None):
        check.check(found, 1)
    assert check.steps_since == 1
    with pytest.raises(EngineMismatch):
        check.check(seen(0.2), 9)


def test_without_a_limit_it_never_stops():
    check = check_after_start(limit=None, max_violations=1)
    for _ in range(5):
        check.check(seen(3.0), 1)
