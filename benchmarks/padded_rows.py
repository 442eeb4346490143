"""How the trainer planned and padded micro-batches before it packed rows; kept for `trainer_packing` to compare with.

Rows are sorted by length and padded on the right, or, where that computes fewer tokens, the rows of one prompt share it by
a mask [T, T], up to 1,024 tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.trainer.algorithm.batch import Row

MAX_SHARED_TOKENS = 1024  # of a prompt with its completions: the mask grows with the square
MAX_SHARED_RATIO = 0.8  # of the tokens computed row by row: a mask makes attention slower


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that several rows share, each of them that prompt followed by one completion."""

    number: int  # equal for rows that can share it
    num_tokens: int


def prompt_of(loss_mask: npt.NDArray[np.bool_], number: int) -> Prompt | None:
    """Return the prompt of a row that can share it; None for a row of several turns, or without a sampled token."""
    where = np.flatnonzero(loss_mask)
    return Prompt(number, int(where[0])) if _ends_with(where, len(loss_mask)) else None


def _ends_with(sampled: npt.NDArray[np.int64], length: int) -> bool:
    """Return True if the sampled positions are the end of a row of ``length`` tokens, without a gap."""
    return len(sampled) > 0 and sampled[0] + len(sampled) == length


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    budget_tokens: int,
    num_ranks: int = 1,
    prompts: Sequence[Prompt | None] = (),
) -> list[list[list[int]]]:
    """Distribute rows over ranks and micro-batches.

    Rows of similar length are put together, so that little is padded; or, where fewer tokens are computed that
    way, rows of one prompt, which is then there once. Every rank gets the same number of micro-batches (their
    gradients are exchanged together) and about the same number of tokens. A rank may get an empty
    micro-batch when there are fewer rows than micro-batches.

    Args:
        lengths: Tokens of each row.
        budget_tokens: Most tokens of a micro-batch, padding included and prompts counted with every row.
        num_ranks: Number of ranks.
        prompts: Of each row, where it can be shared; none: no row can.

    Returns:
        ``plan[rank][micro_batch]`` = row numbers.

    """
    shared = list(prompts) or [None] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    cuts = [_cut([[row] for row in order], lengths, budget_tokens)]
    if any(shared):
        cuts.append(_cut(_by_prompt(order, shared), lengths, budget_tokens))
    plans = [_divisible(pieces, shared, num_ranks) for pieces in cuts]
    best = min(plans, key=lambda pieces: sum(num_computed(piece, lengths, shared) for piece in pieces))
    return _share(best, lengths, num_ranks)


def num_computed(piece: Sequence[int], lengths: Sequence[int], prompts: Sequence[Prompt | None]) -> int:
    """Return how many tokens a micro-batch of these rows computes, in the layout that `build` gives it."""
    plain = len(piece) * max((lengths[row] - 1 for row in piece), default=0)
    bundles: dict[int, int] = {}
    for row in piece:
        prompt = prompts[row]
        if prompt is None:
            return plain
        completion = lengths[row] - prompt.num_tokens - 1  # the last token predicts nothing
        bundles[prompt.number] = bundles.get(prompt.number, prompt.num_tokens) + completion
    longest = max(bundles.values(), default=0)
    return len(bundles) * longest if saves_tokens(len(bundles), longest, plain) else plain


def saves_tokens(num_bundles: int, longest: int, plain: int) -> bool:
    """Return True if sharing prompts saves enough tokens to be worth its mask."""
    return 0 < longest <= MAX_SHARED_TOKENS and num_bundles * longest <= MAX_SHARED_RATIO * plain


def _by_prompt(order: Sequence[int], prompts: Sequence[Prompt | None]) -> list[list[int]]:
    """Return the rows of each prompt together, those with the longest row first."""
    found: dict[int, list[int]] = {}
    for row in order:
        prompt = prompts[row]
        found.setdefault(-1 - row if prompt is None else prompt.number, []).append(row)
    return list(found.values())


def _cut(units: Sequence[list[int]], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Fill pieces with units, longest row first; a unit is in one piece unless it alone is over the budget."""
    pieces: list[list[int]] = []
    for unit in units:
        longest = lengths[pieces[-1][0]] if pieces else 0  # the first row of a piece is its padded length
        if lengths[unit[0]] <= longest and (len(pieces[-1]) + len(unit)) * longest <= budget_tokens:
            pieces[-1] += unit
        elif len(unit) * lengths[unit[0]] <= budget_tokens:
            pieces.append([*unit])
        else:
            pieces += _cut([[row] for row in unit], lengths, budget_tokens)
    return pieces or [[]]


def _divisible(pieces: list[list[int]], prompts: Sequence[Prompt | None], num_ranks: int) -> list[list[int]]:
    """Halve the largest pieces, between two prompts where possible, until every rank can have equally many."""
    pieces = [[*piece] for piece in pieces]
    while len(pieces) % num_ranks:
        largest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        piece = pieces.pop(largest)
        middle = len(piece) // 2
        edges = [
            i for i in range(1, len(piece)) if prompts[piece[i]] != prompts[piece[i - 1]] or prompts[piece[i]] is None
        ]
        cut = min(edges, key=lambda i: abs(i - middle), default=middle)
        pieces += [piece[:cut], piece[cut:]]
    return pieces


def _share(pieces: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    def cost(piece: list[int]) -> int:
        return sum(lengths[row] for row in piece)

    per_rank = len(pieces) // num_ranks
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for piece in sorted(pieces, key=cost, reverse=True):  # the largest piece goes to the rank with the fewest tokens
        load, rank = heapq.heappop(loads)
        plan[rank].append(piece)
        if len(plan[rank]) < per_rank:
            heapq.heappush(loads, (load + cost(piece), rank))
    return plan


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Position of every token of a micro-batch."""

    input_ids: npt.NDArray[np.int64]  # [R, T]
    predictors: list[npt.NDArray[np.int64]]  # for each trajectory, the flat positions that predict its tokens
    position_ids: npt.NDArray[np.int64] | None = None  # [R, T]
    attention_mask: npt.NDArray[np.bool_] | None = None  # [R, T, T]


def build(rows: Sequence[Row]) -> Layout:
    """Return the layout of one micro-batch."""
    sampled = [np.flatnonzero(row.loss_mask) for row in rows]
    return _shared_prompts(rows, sampled) or row_by_row(rows, sampled)


def row_by_row(rows: Sequence[Row], sampled: Sequence[npt.NDArray[np.int64]]) -> Layout:
    longest = max((len(row.token_ids) - 1 for row in rows), default=1)  # the last token predicts nothing
    input_ids = np.zeros((max(1, len(rows)), longest), dtype=np.int64)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.token_ids) - 1] = row.token_ids[:-1]
    return Layout(input_ids, [number * longest + where - 1 for number, where in enumerate(sampled)])


def _shared_prompts(rows: Sequence[Row], sampled: Sequence[npt.NDArray[np.int64]]) -> Layout | None:
    """Put the rows of one prompt after it; None where that saves too little or a row is not prompt and completion."""
    bundles: dict[bytes, list[int]] = {}
    for number, (row, where) in enumerate(zip(rows, sampled, strict=True)):
        if not _ends_with(where, len(row.loss_mask)):
            return None
        bundles.setdefault(row.token_ids[: where[0]].tobytes(), []).append(number)
    prompts = [int(sampled[members[0]][0]) for members in bundles.values()]
    lengths = [
        prompt + sum(len(sampled[number]) - 1 for number in members)
        for prompt, members in zip(prompts, bundles.values(), strict=True)
    ]
    plain = len(rows) * max((len(row.token_ids) - 1 for row in rows), default=0)
    if not saves_tokens(len(lengths), max(lengths, default=0), plain):
        return None
    shape = (len(lengths), max(lengths))
    input_ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask = np.zeros((*shape, shape[1]), dtype=np.bool_)
    mask[:] = np.eye(shape[1], dtype=np.bool_)  # padding attends to itself: a row without any would be NaN
    causal = np.tri(shape[1], dtype=np.bool_)
    predictors: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    for place, (prompt, members) in enumerate(zip(prompts, bundles.values(), strict=True)):
        input_ids[place, :prompt] = rows[members[0]].token_ids[:prompt]
        position_ids[place, :prompt] = np.arange(prompt)
        mask[place, :prompt, :prompt] = causal[:prompt, :prompt]
        start = prompt
        for number in members:
            size = len(sampled[number]) - 1  # the last token predicts nothing
            end = start + size
            input_ids[place, start:end] = rows[number].token_ids[prompt:-1]
            position_ids[place, start:end] = prompt + np.arange(size)
            mask[place, start:end, :prompt] = True
            mask[place, start:end, start:end] = causal[:size, :size]
            predictors[number] = place * shape[1] + np.concatenate([[prompt - 1], np.arange(start, end)])
            start = end
    return Layout(input_ids, predictors, position_ids, mask)
