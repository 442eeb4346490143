"""Waiting for the oldest groups has a bound that does not grow with the run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.groups.overtake_backoff import Patience


def test_waits_in_vain_halve_and_come_back() -> None:
    """Half as long after each batch that overtook somebody all the same; whole after one that overtook nobody."""
    patience = Patience()
    waits = []
    for overtook in (True, True, False, True):
        waits.append(patience.of(8.0))
        patience.took(overtook=overtook)
    assert waits == [8.0, 4.0, 2.0, 8.0]
    assert patience.of(8.0) == 4.0


@given(st.lists(st.booleans(), max_size=200))
def test_a_run_of_waits_in_vain_costs_less_than_two(outcomes: list[bool]) -> None:
    """However long somebody is late in every step, the waits between two batches that left nobody add up to under two."""
    patience, spent = Patience(), 0.0
    for overtook in outcomes:
        spent = spent + patience.of(1.0) if overtook else 0.0
        patience.took(overtook=overtook)
        assert spent < 2.0
