"""When trainer and engine have parted, a run stops; when they have not, it does not."""

from __future__ import annotations

import math

import pytest

from penstock.trainer.algorithm.engine_check import MIN_TOKENS, EngineCheck
from penstock.trainer.algorithm.mismatch import Mismatch
from penstock.trainer.errors import EngineMismatch


def seen(mean_abs: float, num_tokens: int = 1000) -> Mismatch:
    """A comparison of so many tokens."""
    return Mismatch(num_tokens=num_tokens, mean_abs=mean_abs, max_abs=10 * mean_abs, kl_k1=0.0, kl_k3=mean_abs**2 / 2)


def check_after_start(limit: float | None = 0.1, patience: int = 3) -> EngineCheck:
    """A check whose first look was fine."""
    check = EngineCheck(limit=limit, patience=patience)
    check.look(seen(0.01), 0)
    return check


@pytest.mark.parametrize("mean_abs", [0.11, 5.0, math.inf, math.nan])
def test_the_first_look_decides_alone(mean_abs: float):
    """A run that starts on an engine that means something else, or nothing, ends at once and says where to look."""
    with pytest.raises(EngineMismatch, match=r"version 4.*at the first look.*temperature.*dtype.*tokenizer"):
        EngineCheck(limit=0.1, patience=3).look(seen(mean_abs), 4)


def test_later_looks_must_agree_with_one_another():
    """Two bad looks are forgiven by a good one; three in a row are not."""
    check = check_after_start()
    for mean_abs in (0.2, 0.3, 0.05, 0.2, 0.3):
        check.look(seen(mean_abs), 1)
    with pytest.raises(EngineMismatch, match="in 3 looks one after the other"):
        check.look(seen(0.2), 9)


def test_steps_without_fresh_tokens_are_no_looks():
    """Stale tokens, or a handful of fresh ones, neither forgive nor accuse; how long nobody looked is told."""
    check = check_after_start()
    for found in (seen(0.2), None, seen(0.0, MIN_TOKENS - 1), seen(0.2), None):
        check.look(found, 1)
    assert check.steps_since == 1
    with pytest.raises(EngineMismatch):
        check.look(seen(0.2), 9)


def test_without_a_limit_it_only_watches():
    """None reports and never stops."""
    check = check_after_start(limit=None, patience=1)
    for _ in range(5):
        check.look(seen(3.0), 1)
