"""Micro-batches: every row is in one, none exceeds the budget, ranks have equal numbers of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from penstock.trainer.algorithm.batch import Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.packed_rows import PairCost, Prefixes
from penstock.trainer.errors import BatchDoesNotFit


def num_computed(piece: Sequence[int], lengths: Sequence[int], prefixes: Prefixes) -> int:
    """Return how many tokens a micro-batch of these rows computes."""
    kept = set(piece)
    total, shared = 0, 0
    for row, common in zip(prefixes.order, prefixes.common, strict=True):
        shared = min(shared, common)
        if row in kept:
            total += lengths[row] - 1 - shared
            shared = lengths[row]
    return total


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    budget=st.integers(40, 200),
    num_ranks=st.integers(1, 5),
    padded=st.booleans(),
)
def test_plan_keeps_every_row_once_within_the_budget(
    lengths: list[int], budget: int, num_ranks: int, padded: bool
) -> None:
    """Every row is planned exactly once, no micro-batch is over budget, all ranks have equally many."""
    plan = plan_micro_batches(lengths, budget_tokens=budget, num_ranks=num_ranks, padded=padded)
    assert sorted(row for rank in plan for piece in rank for row in piece) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for piece in (piece for rank in plan for piece in rank if piece):
        longest = max(lengths[row] for row in piece)
        assert (len(piece) * longest if padded else sum(lengths[row] - 1 for row in piece)) <= budget


ragged = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.booleans()),
    min_size=1, max_size=8,
)  # fmt: skip


def _rows(groups: list[tuple[int, list[int], bool]]) -> list[Row]:
    """Rows of some prompts; those of the last kind were interrupted by a tool."""
    rows = []
    for number, (prompt, completions, has_hole) in enumerate(groups):
        for answer, size in enumerate(completions):
            sampled = [n for n in range(prompt, prompt + size) if not (has_hole and n == prompt + size - 2)]
            rows.append(_row([number] * prompt + [90 + answer] * size, sampled))
    return rows


@examples(60)
@given(groups=ragged, budget=st.integers(40, 200), num_ranks=st.integers(1, 4))
def test_a_shared_prompt_counts_once(
    groups: list[tuple[int, list[int], bool]], budget: int, num_ranks: int
) -> None:  # fmt: skip
    """Every row once; the count is that of the tensors, within the budget, and never more than without sharing."""
    rows = _rows(groups)
    lengths = [len(row.token_ids) for row in rows]
    prefixes = prefixes_of([row.token_ids for row in rows], [row.loss_mask for row in rows])
    plan = plan_micro_batches(
        lengths, budget_tokens=budget, num_ranks=num_ranks, prefixes=prefixes, pair_cost=PairCost(0.1)
    )
    pieces = [piece for rank in plan for piece in rank]
    assert sorted(row for piece in pieces for row in piece) == list(range(len(rows)))
    assert len({len(rank) for rank in plan}) == 1
    for piece in pieces:
        counted = num_computed(piece, lengths, prefixes)
        built = build([rows[row] for row in piece]).input_ids.numel()
        assert counted <= min(budget, sum(lengths[row] - 1 for row in piece))
        assert built == max(1, counted)


@pytest.mark.parametrize(
    ("prompt", "answer", "budget", "num_ranks", "computed", "num_apart"),
    [
        pytest.param(2000, 2661, 23_300, 1, [2000 + 8 * 2660], 2, id="a long prompt once"),
        pytest.param(50, 21, 140, 1, [50 + 4 * 20] * 2, 4, id="over the budget, in the fewest pieces"),
        pytest.param(50, 51, 1000, 2, [50 + 4 * 50] * 2, 1, id="divided over ranks"),
    ],
)
def test_a_group_computes_its_prompt_once_in_each_piece(
    prompt: int, answer: int, budget: int, num_ranks: int, computed: list[int], num_apart: int
) -> None:
    """Of eight answers; ``num_apart`` are the micro-batches of a rank that shares nothing."""
    rows = [_row([7] * prompt + [n] * answer, list(range(prompt, prompt + answer))) for n in range(8)]
    lengths = [len(row.token_ids) for row in rows]
    prefixes = prefixes_of([row.token_ids for row in rows], [row.loss_mask for row in rows])
    plan = plan_micro_batches(lengths, budget_tokens=budget, num_ranks=num_ranks, prefixes=prefixes)
    assert [num_computed(piece, lengths, prefixes) for rank in plan for piece in rank] == computed
    assert len(plan_micro_batches(lengths, budget_tokens=budget, num_ranks=num_ranks)[0]) == num_apart


def test_plan_balances_cost_over_ranks() -> None:
    """One row of 1,000 tokens costs as much as twenty-one of 100 where attention weighs as much as the rest at 910."""
    lengths = [1001] + [101] * 40
    for pair_cost, expected in (
        (PairCost(), [25, 16]),
        (PairCost(2 / 910), [29, 12]),
        (PairCost(windowed=2 / 910, window=101), [25, 16]),
    ):
        plan = plan_micro_batches(lengths, budget_tokens=10_000, num_ranks=2, pair_cost=pair_cost)
        assert sorted((len(piece) for [piece] in plan), reverse=True) == expected
    ragged = [1000, 10, 10, 500, 480, 20, 300, 700] * 4
    plan = plan_micro_batches(ragged, budget_tokens=2000, num_ranks=2)
    loads = [sum(ragged[row] for piece in rank for row in piece) for rank in plan]
    assert max(loads) < 1.05 * min(loads)


def test_the_error_for_a_too_long_row_names_the_settings_to_change() -> None:
    with pytest.raises(BatchDoesNotFit, match=r"200 tokens.*micro_batch_tokens = 100.*max_new_tokens"):
        plan_micro_batches([10, 200], budget_tokens=100)


def _row(tokens: list[int], sampled: list[int], advantage: float = 0.5) -> Row:
    mask = np.isin(np.arange(len(tokens)), sampled)
    logprobs = np.where(mask, -np.arange(len(tokens), dtype=np.float32), 0).astype(np.float32)
    return Row(np.array(tokens, dtype=np.int32), mask, logprobs, advantage, 0.25)


def test_tensors_line_up() -> None:
    """Each sampled token is predicted from the position before it in its own row, masks with holes included."""
    batch = build([_row([7, 8, 9], [1, 2]), _row([1, 2, 3, 4, 5], [2, 4], -1.0)])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 7, 8]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.predictors.tolist() == [4, 5, 1, 3]
    assert batch.targets.tolist() == [8, 9, 3, 5]
    assert batch.behaviour_logprobs.tolist() == [-1.0, -2.0, -2.0, -4.0]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0, -1.0]
    assert batch.weights.tolist() == [0.25] * 4


def test_an_empty_micro_batch_is_buildable() -> None:
    """A rank without rows gets tensors without targets, so that it takes part in collectives."""
    batch = build([])
    assert batch.input_ids.shape == (1, 1)
    assert len(batch.targets) == len(batch.predictors) == 0
