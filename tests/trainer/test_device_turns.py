"""When engines and trainer change on a shared GPU."""

from __future__ import annotations

import itertools

import pytest

from penstock.trainer.device_turns import TurnFacts


@pytest.mark.parametrize(
    ("has_batch", "num_to_sample", "awaits_engine", "is_free", "trainer", "engines"),
    [
        (False, 8, False, False, False, True),  # nothing to train
        (False, 0, False, False, False, False),  # nothing to sample either: no change costs seconds
        (True, 8, False, False, False, False),  # another whole batch can be sampled, while one waits
        (True, 3, False, False, True, False),  # the rest makes no batch
        (True, 0, False, False, True, False),
        (True, 8, False, True, True, False),  # no engine runs
        (True, 3, True, False, True, True),  # an evaluation is waited for, at the start or the end
    ],
)
def test_the_device_goes_to_whom_it_helps(
    has_batch: bool, num_to_sample: int, awaits_engine: bool, is_free: bool, trainer: bool, engines: bool
) -> None:
    facts = TurnFacts(has_batch, num_to_sample, 4, awaits_engine, is_free)
    assert (facts.trainer_is_due, facts.engines_are_due) == (trainer, engines)


def test_the_device_never_goes_back_and_forth_without_work_in_between() -> None:
    """Whatever the facts, not both are due, unless an evaluation is waited for."""
    for has_batch, to_sample, is_free in itertools.product((False, True), range(12), (False, True)):
        facts = TurnFacts(has_batch, to_sample, 4, is_free=is_free)
        assert not (facts.trainer_is_due and facts.engines_are_due)
