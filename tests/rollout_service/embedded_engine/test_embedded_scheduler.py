"""The embedded engine's scheduler: which sequences start now."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout_service.embedded_engine.scheduler import Limits, choose_admissions, padded_rows
from penstock.rollout_service.embedded_engine.sequence import Sampling, Sequence


def sequence(prompt: int = 4, new: int = 8, *, token: int = 1, **fields: object) -> Sequence:
    """A sequence of so many prompt tokens, all alike, that may generate so many."""
    more: Any = fields
    return Sequence("r", (token,) * prompt, Sampling(max_new_tokens=new), **more)


def limits(max_running: int = 64, max_total_tokens: int = 10**6, max_prefill_tokens: int = 10**6) -> Limits:
    return Limits(max_running, max_total_tokens, max_prefill_tokens)


def test_all_start_when_they_fit() -> None:
    waiting = deque(sequence() for _ in range(5))
    assert choose_admissions(waiting, [], limits()) == list(waiting)


def test_equal_prompts_count_once() -> None:
    waiting = deque([*(sequence(prompt=100) for _ in range(8)), sequence(prompt=100, token=2)])
    assert len(choose_admissions(waiting, [], limits(max_prefill_tokens=150))) == 8


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({}, 8),  # one token each
        ({"input_logprobs_from": 40}, 2),
        ({"input_logprobs_from": 40, "input_logprobs": []}, 8),  # reported before it was retracted
        ({"input_logprobs_from": 0}, 1),
        ({"wants_experts": True}, 8),  # they are known as keys and values are
    ],
)
def test_known_tokens_count_where_they_are_computed_all_the_same(fields: dict[str, object], num: int) -> None:
    """Known keys and values do not let a pass exceed its limit when something else of the tokens is wanted."""
    waiting = deque(sequence(prompt=100, token=index, **fields) for index in range(8))
    chosen = choose_admissions(waiting, [], limits(max_prefill_tokens=150), lambda prefix: len(prefix[1]))
    assert len(chosen) == num


def test_a_sample_of_a_known_prompt_that_must_be_computed_counts() -> None:
    """The first needs one token, the second all of the same prompt: what is left to compute is added."""
    waiting = deque([sequence(prompt=100), sequence(prompt=100, input_logprobs_from=0), sequence(prompt=100)])
    for prefill, num in ((99, 1), (100, 3)):
        chosen = choose_admissions(waiting, [], limits(max_prefill_tokens=prefill), lambda prefix: len(prefix[1]))
        assert len(chosen) == num


def test_new_sequences_start_in_eighths() -> None:
    """While others run and many wait, sequences start once an eighth of the rows is free."""
    waiting = deque(sequence(token=index) for index in range(100))
    assert choose_admissions(waiting, [sequence()] * 63, limits()) == []
    assert len(choose_admissions(waiting, [sequence()] * 56, limits())) == 8


def test_the_last_waiting_sequence_starts_at_once() -> None:
    assert len(choose_admissions(deque([sequence()]), [sequence()] * 63, limits())) == 1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=10),
    st.integers(1, 30),
    st.integers(100, 2000),
    st.integers(1, 200),
)
def test_limits_hold_and_no_sequence_starves(waits: list, runs: list, rows: int, total: int, prefill: int) -> None:
    """Cache, rows and pass do not exceed their limits, in order; an idle engine always starts one sequence."""
    waiting = deque(sequence(prompt, new, token=index) for index, (prompt, new) in enumerate(waits))
    running: list[Sequence] = []
    for prompt, new in runs[:rows]:
        if padded_rows(len(running) + 1) * max([prompt + new, *(item.max_tokens for item in running)]) <= total:
            running.append(sequence(prompt, new))
    chosen = choose_admissions(waiting, running, limits(rows, total, prefill))
    together = [*running, *chosen]
    assert chosen == list(waiting)[: len(chosen)]
    assert len(together) <= rows
    assert not together or padded_rows(len(together)) * max(item.max_tokens for item in together) <= total
    assert len(chosen) <= 1 or sum(len(item.prompt) for item in chosen) <= prefill
    assert chosen or running or not waiting


@given(st.integers(1, 10_000))
def test_padding_is_small_and_monotone(rows: int) -> None:
    """Padded rows are enough, at most an eighth (or seven) too many, and never fewer for more."""
    padded = padded_rows(rows)
    assert rows <= padded <= rows + max(7, rows // 8 + 1)
    assert padded_rows(rows + 1) >= padded
    assert padded_rows(padded) == padded
