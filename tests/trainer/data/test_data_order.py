"""The order of prompts: a permutation for every epoch, the same for the same seed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.data.data_order import DataOrder, Place


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 5), st.booleans())
def test_every_prompt_is_used_once_in_every_epoch(num_prompts: int, seed: int, epoch: int, shuffle: bool):
    order = DataOrder(num_prompts, seed, shuffle)
    positions = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    places = [order.at(position) for position in positions]
    assert {place.epoch for place in places} == {epoch}
    assert sorted(place.prompt for place in places) == list(range(num_prompts))
    assert [order.position_of(place) for place in places] == list(positions)


def test_order_depends_on_seed_and_epoch():
    orders = {
        tuple(DataOrder(100, seed).at(epoch * 100 + i).prompt for i in range(100))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert [DataOrder(5, 0, shuffle=False).at(i) for i in (0, 4, 5)] == [Place(0, 0), Place(0, 4), Place(1, 0)]


def test_order_never_changes():
    assert [DataOrder(10, 0).at(i).prompt for i in range(10)] == [0, 4, 2, 9, 5, 7, 1, 8, 6, 3]


def test_adjacent_rows_are_separated():
    """A shuffled order is close to random: adjacent rows are on average a third of the file apart."""
    order = DataOrder(1000, 3)
    prompts = [order.at(i).prompt for i in range(1000)]
    jumps = [abs(a - b) for a, b in pairwise(prompts)]
    assert 290 < sum(jumps) / len(jumps) < 380


def test_an_order_without_prompts_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        DataOrder(0, 0)
