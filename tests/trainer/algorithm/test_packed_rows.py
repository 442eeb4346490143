"""Rows in one stream: every row can be read back, attends to itself alone, and shares what is worth sharing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from penstock.trainer.algorithm.packed_rows import BRANCH_TOKENS, Node, common_prefixes, pack

tokens = st.integers(0, 1)  # few, so that rows often agree
runs = st.lists(tokens, min_size=0, max_size=40)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Rows that continue the beginning of an earlier row, or begin anew; and where each one's prompt ends."""
    rows: list[np.ndarray] = []
    starts: list[int] = []
    for _ in range(draw(st.integers(1, 9))):
        before = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else np.empty(0, np.int32)
        kept = before[: draw(st.integers(0, len(before)))]
        rows.append(np.concatenate([kept, np.array(draw(runs), dtype=np.int32)]).astype(np.int32))
        starts.append(draw(st.integers(0, len(rows[-1]))))
    return rows, starts


@examples(60)
@given(drawn=trees())
def test_every_row_is_in_the_stream_and_attends_to_itself_alone(drawn: tuple[list[np.ndarray], list[int]]) -> None:
    """Tokens, places and the tokens attended to are those of the row alone, for any rows with any common prefixes."""
    rows, starts = drawn
    packed = pack(rows, starts)
    layout, mask = packed.layout, packed.layout.mask()
    for row, where in zip(rows, packed.positions, strict=True):
        assert packed.token_ids[where].tolist() == row.tolist()
        assert layout.depths[where].tolist() == list(range(len(row)))
        for depth, position in enumerate(where):
            assert np.flatnonzero(mask[position]).tolist() == where[: depth + 1].tolist()
    assert [node.start for node in layout.nodes] == [0, *(node.end for node in layout.nodes[:-1])]
    assert layout.num_tokens == len(packed.token_ids) == len(set(np.concatenate(layout.rows()).tolist()))
    paths = {tuple(path) for path in layout.rows()}
    assert {tuple(where) for where in packed.positions if len(where)} <= {
        p[:n] for p in paths for n in range(1, len(p) + 1)
    }


def test_a_prompt_and_its_answers_are_a_tree_of_one_level() -> None:
    prompt = np.arange(5000, dtype=np.int32)
    answers = [np.append(prompt, np.full(3, 6000 + n, np.int32)) for n in range(3)]
    packed = pack([*answers, prompt[1:9]], [5000] * 3 + [8])
    assert packed.layout.nodes == (
        Node(0, 5000, 5009), Node(5000, 5003, 5003), Node(5003, 5006, 5006), Node(5006, 5009, 5009), Node(5009, 5017, 5017)
    )  # fmt: skip
    assert packed.layout.longest_row == 5003


def test_a_row_that_continues_another_is_the_same_node() -> None:
    """A later turn, whose prompt is the earlier one with its answer, needs no branch; equal rows are computed once."""
    turn = np.arange(50, dtype=np.int32)
    assert pack([turn, turn[:20], turn[:30], turn], [40, 10, 25, 40]).layout.nodes == (Node(0, 50, 50),)


def test_rows_branch_at_prompts_and_at_multiples_after_them() -> None:
    """Two answers that agree for a few tokens do not get a node for these; nor do prompts that only begin alike."""
    one, other = np.zeros(100, np.int32), np.zeros(100, np.int32)
    one[10 + BRANCH_TOKENS + 3], other[5] = 1, 1
    assert common_prefixes([np.zeros(100, np.int32), one], [10, 10]).common == [0, 10 + BRANCH_TOKENS]
    assert common_prefixes([np.zeros(100, np.int32), other], [10, 10]).common == [0, 0]


def test_nothing_is_one_token() -> None:
    """A micro-batch without rows is still computable, so that its rank takes part in collectives."""
    assert pack([], []).layout.nodes == pack([np.empty(0, np.int32)], [0]).layout.nodes == (Node(0, 1, 1),)
