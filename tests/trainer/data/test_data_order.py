"""The order of prompts: a permutation for every epoch, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.data.row_sets import write_rows

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.data.data_order import DataOrder, Place, WeightedOrder, prompt_order
from penstock.trainer.errors import MalformedData
from penstock.trainer.groups.prompt_cursor import order_id
from penstock.trainer.preflight import open_data
from penstock.trainer.settings import TrainerSettings


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 5), st.booleans())
def test_every_prompt_is_used_once_in_every_epoch(num_prompts: int, seed: int, epoch: int, shuffle: bool):
    order = DataOrder(num_prompts, seed, shuffle)
    positions = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    places = [order.at(position) for position in positions]
    assert {place.epoch for place in places} == {epoch}
    assert sorted(place.prompt for place in places) == list(range(num_prompts))
    assert [order.position_of(place) for place in places] == list(positions)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=5),
    st.integers(0, 99),
    st.booleans(),
)
def test_a_weighted_order_keeps_its_shares_at_every_position(sources: list[tuple[int, int]], seed: int, shuffle: bool):
    """Of the first N prompts a share p has p N, to less than one; each pass over a source has each of its rows once."""
    rows = {
        str(n): list(range(n, sum(count for _, count in sources) * 5, len(sources)))[:count]
        for n, (_, count) in enumerate(sources)
    }
    shares = {str(n): share for n, (share, _) in enumerate(sources)}
    order, used = WeightedOrder(rows, shares, seed, shuffle=shuffle), Counter[str]()
    source_of = {prompt: name for name, prompts in rows.items() for prompt in prompts}
    passes: dict[tuple[str, int], list[int]] = {}
    for position in range(60):
        place = order.at(position)
        assert order.position_of(place) == position
        name = source_of[place.prompt]
        used[name] += 1
        passes.setdefault((name, place.epoch), []).append(place.prompt)
        for one, share in shares.items():
            assert abs(used[one] * sum(shares.values()) - share * (position + 1)) < sum(shares.values())
    for (name, epoch), prompts in passes.items():
        assert len(set(prompts)) == len(prompts)
        assert (name, epoch + 1) not in passes or sorted(prompts) == rows[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows of two sources, in an order of their own."""
    folder = tmp_path_factory.mktemp("weights")
    write_model(folder / "model", seed=0)
    write_rows(folder, *({"prompt": f"{n}+1=", "data_source": "sums" if n % 3 else "rest"} for n in range(9)))
    return folder


def weighted(folder: Path, weights: str) -> TrainerSettings:
    more = [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'rows.jsonl'}",
        "data.text_prompts=plain",
        "reward.name=r",
        "rollout.max_new_tokens=8",
    ]
    return load(TrainerSettings, overrides=[*more, f"data.weights={weights}"]).settings


def test_rows_come_by_the_weights_of_their_sources(folder: Path) -> None:
    """Other proportions are another order to a checkpoint, the same ones in other numbers are the same order."""
    ids, sources = [], []
    for weights in (
        "{sums = 1, rest = 3}",
        "{sums = 0.25, rest = 0.75}",
        "{rest = 3, sums = 2}",
        '{"rest,none,sums" = 1}',
    ):
        settings = weighted(folder, weights)
        prompts = open_data(settings).train
        order = prompt_order(prompts, settings)
        ids.append(order_id(order, prompts.fingerprint))
        sources.append(Counter(prompts[order.at(position).prompt].reward.data_source for position in range(40)))
    assert sources == [
        {"rest": 30, "sums": 10},
        {"rest": 30, "sums": 10},
        {"rest": 24, "sums": 16},
        {"rest": 12, "sums": 28},
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ("{rest = 1}", r"the data_source sums has 0 weights, not one; there are rest \(3 rows\), sums \(6 rows\)"),
        ("{rest = 1, sums = 1, sum = 1}", "no row has the data_source sum; there are rest"),
        ("{rest = 0, sums = 1}", "greater than 0"),
        ("{rest = -0.5, sums = 1}", "greater than 0"),
        ("{rest = nan, sums = 1}", "finite number|greater than 0"),
        ("{rest = 0.00001, sums = 1}", "their sum is 100001, the limit is 10000; round them"),
        ('{"rest,sums" = 1, sums = 1}', "the data_source sums has 2 weights, not one"),
    ],
)
def test_weights_that_make_no_order_are_refused_before_the_run(folder: Path, weights: str, problem: str) -> None:
    with pytest.raises((ConfigError, MalformedData), match=problem):
        open_data(weighted(folder, weights))


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
