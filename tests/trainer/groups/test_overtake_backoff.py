"""The wait for the oldest groups has a bound that does not grow with the run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.groups.collect import OvertakeBackoff


def test_waits_halve_while_groups_are_overtaken_and_are_restored_after() -> None:
    backoff = OvertakeBackoff()
    waits = []
    for overtook in (True, True, False, True):
        waits.append(backoff.scale(8.0))
        backoff.record(overtook=overtook)
    assert waits == [8.0, 4.0, 2.0, 8.0]
    assert backoff.scale(8.0) == 4.0


@given(st.lists(st.booleans(), max_size=200))
def test_consecutive_waits_without_result_cost_less_than_two_full_ones(outcomes: list[bool]) -> None:
    """However long groups are late in every step, the waits between two batches that overtake none add up to under two."""
    backoff, spent = OvertakeBackoff(), 0.0
    for overtook in outcomes:
        spent = spent + backoff.scale(1.0) if overtook else 0.0
        backoff.record(overtook=overtook)
        assert spent < 2.0
