"""Micro-batches: every row is in one, none exceeds the budget, ranks have equal numbers of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from penstock.trainer.algorithm.batch import Prompt, Row, build, num_computed, plan_micro_batches, prompt_of
from penstock.trainer.errors import BatchDoesNotFit


@examples(100)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    budget=st.integers(40, 200),
    num_ranks=st.integers(1, 5),
)
def test_plan_keeps_every_row_once_within_the_budget(lengths: list[int], budget: int, num_ranks: int) -> None:
    """Every row is planned exactly once, no micro-batch is over budget, all ranks have equally many."""
    plan = plan_micro_batches(lengths, budget_tokens=budget, num_ranks=num_ranks)
    assert sorted(row for rank in plan for piece in rank for row in piece) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for piece in rank:
            assert len(piece) * max((lengths[row] for row in piece), default=0) <= budget


ragged = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.booleans()),
    min_size=1, max_size=8,
)  # fmt: skip


def _rows(groups: list[tuple[int, list[int], bool]]) -> list[Row]:
    """Rows of some prompts; those of the last kind were interrupted by a tool and cannot share theirs."""
    rows = []
    for number, (prompt, completions, has_hole) in enumerate(groups):
        for size in completions:
            sampled = [n for n in range(prompt, prompt + size) if not (has_hole and n == prompt + size - 1)]
            rows.append(_row([number] * prompt + [1] * size, sampled))
    return rows


@examples(100)
@given(groups=ragged, budget=st.integers(40, 200), num_ranks=st.integers(1, 4))
def test_rows_of_a_prompt_are_kept_together_where_that_costs_no_more(
    groups: list[tuple[int, list[int], bool]], budget: int, num_ranks: int
) -> None:
    """Every row once, within the budget; never more tokens than sorted by length; the count is that of the tensors."""
    rows = _rows(groups)
    lengths = [len(row.token_ids) for row in rows]
    numbers = [number for number, (_, completions, _) in enumerate(groups) for _ in completions]
    prompts = [prompt_of(row.loss_mask, number) for row, number in zip(rows, numbers, strict=True)]
    plans = [
        plan_micro_batches(lengths, budget_tokens=budget, num_ranks=num_ranks, prompts=known) for known in ((), prompts)
    ]
    costs = []
    for plan in plans:
        pieces = [piece for rank in plan for piece in rank]
        assert sorted(row for piece in pieces for row in piece) == list(range(len(rows)))
        assert len({len(rank) for rank in plan}) == 1
        assert all(len(piece) * max(lengths[row] for row in piece) <= budget for piece in pieces if piece)
        counted = [num_computed(piece, lengths, prompts) for piece in pieces]
        assert counted == [build([rows[row] for row in piece]).input_ids.numel() if piece else 0 for piece in pieces]
        costs.append(sum(counted))
    assert costs[1] <= costs[0]


def test_ragged_groups_compute_a_third_of_the_tokens() -> None:
    """64 groups of eight short answers to long prompts: kept together 24,744 tokens, sorted by length 82,123."""
    rng = np.random.default_rng(0)
    lengths, prompts = [], []
    for number in range(64):
        prompt, hard = int(rng.integers(100, 201)), rng.lognormal(0, 0.5)
        for _ in range(8):
            lengths.append(prompt + int(np.clip(rng.lognormal(np.log(20 * hard), 0.7), 1, 100)))
            prompts.append(Prompt(number, prompt))
    by_length, together = (
        sum(num_computed(piece, lengths, prompts) for rank in plan for piece in rank)
        for plan in (
            plan_micro_batches(lengths, budget_tokens=4096),
            plan_micro_batches(lengths, budget_tokens=4096, prompts=prompts),
        )
    )
    assert (by_length, together) == (82_123, 24_744)


def test_plan_balances_tokens_over_ranks() -> None:
    """Two ranks get nearly the same number of tokens of a ragged batch."""
    lengths = [1000, 10, 10, 500, 480, 20, 300, 700] * 4
    plan = plan_micro_batches(lengths, budget_tokens=2000, num_ranks=2)
    loads = [sum(lengths[row] for piece in rank for row in piece) for rank in plan]
    assert max(loads) < 1.25 * min(loads)


def test_the_error_for_a_too_long_row_names_the_settings_to_change() -> None:
    """A trajectory over the budget is an error that names the settings, and is not truncated."""
    with pytest.raises(BatchDoesNotFit, match=r"200 tokens.*micro_batch_tokens = 100.*max_new_tokens"):
        plan_micro_batches([10, 200], budget_tokens=100)


def _row(tokens: list[int], sampled: list[int], advantage: float = 0.5) -> Row:
    mask = np.isin(np.arange(len(tokens)), sampled)
    logprobs = np.where(mask, -np.arange(len(tokens), dtype=np.float32), 0).astype(np.float32)
    return Row(np.array(tokens, dtype=np.int32), mask, logprobs, advantage, 0.25)


def test_tensors_line_up() -> None:
    """Each sampled token is predicted from the position before it, in its own padded row, masks with holes included."""
    batch = build([_row([7, 8, 9], [1, 2]), _row([1, 2, 3, 4, 5], [2, 4], -1.0)])
    assert batch.input_ids.tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert batch.predictors.tolist() == [0, 1, 4 + 1, 4 + 3]
    assert batch.targets.tolist() == [8, 9, 3, 5]
    assert batch.behaviour_logprobs.tolist() == [-1.0, -2.0, -2.0, -4.0]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0, -1.0]
    assert batch.weights.tolist() == [0.25] * 4


def test_an_empty_micro_batch_is_buildable() -> None:
    """A rank without rows gets tensors without targets, so that it takes part in collectives."""
    batch = build([])
    assert batch.input_ids.shape == (1, 1)
    assert len(batch.targets) == len(batch.predictors) == 0
