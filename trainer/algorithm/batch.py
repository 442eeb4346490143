"""Micro-batches of tensors from trajectories with advantages, distributed over the ranks; pure.

Rank 0 plans which rows go into which micro-batch of which rank (`plan_micro_batches`), every rank
builds its own (`build`). Rows are padded on the right and need no attention mask: a causal model
never attends to the padding, and the padding's outputs are never read.

Where it saves computation, the rows of one prompt share it: the prompt is there once, followed by the
completions, and a mask lets each completion attend to the prompt and itself alone. The log-probabilities and gradients are
the same; for short completions of short prompts a step computes less than half as many tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.errors import BatchDoesNotFit

MAX_SHARED_TOKENS = 1024  # of a prompt with its completions: the mask grows with the square
MAX_SHARED_RATIO = 0.8  # of the tokens computed row by row: a mask makes attention slower


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory with what the loss reads of it."""

    token_ids: npt.NDArray[np.int32]  # [T] prompt then completion
    loss_mask: npt.NDArray[np.bool_]  # [T] True where the policy sampled the token; never at position 0
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]; all 0.0 for supervised rows
    advantage: float
    weight: float  # of each sampled token in the loss (`trainer/algorithm/aggregation.py`)
    ages: npt.NDArray[np.int32] | None = None  # [T] versions between sampling and training; None: all 0
    sft_weight: float = 0.0  # of each sampled token in the added cross-entropy
    turns: Sequence[
        tuple[int, int]
    ] = ()  # start and end of each, in order, together all sampled tokens; none: one turn
    turn_advantages: Sequence[float] = ()  # of each turn, instead of ``advantage``

    def by_turn(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Give every sampled token the value of its turn."""
        return np.repeat(np.asarray(values, dtype=np.float64), [end - start for start, end in self.turns])


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward and backward pass; R rows padded to T tokens, N sampled tokens."""

    input_ids: Tensor  # [R, T] int64, each trajectory without its last token
    predictors: Tensor  # [N] int64, flat position whose output predicts the sampled token
    targets: Tensor  # [N] int64
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, which trajectory the token belongs to
    ages: Tensor  # [N] float32, versions between sampling and training
    sft_weights: Tensor  # [N] float32, of the added cross-entropy
    num_sequences: int  # trajectories, those without a sampled token included
    position_ids: Tensor | None = None  # [R, T] int64, where rows share prompts; None: 0, 1, 2, …
    attention_mask: Tensor | None = None  # [R, 1, T, T] bool, True where a token attends; None: causal
    proximal_logprobs: Tensor | None = None  # [N] float32, recomputed before the first update on the batch
    reference_logprobs: Tensor | None = None  # [N] float32, of the frozen reference
    reference_kl: Tensor | None = None  # [N] float32, exact KL to it over the vocabulary, for rewards by token
    turn: Tensor | None = None  # [N] int64, which turn the token belongs to; None: every trajectory is one turn
    num_turns: int = 0
    drift_limit: float | None = None  # largest (log current / behaviour)² that M2PO keeps, or clips at, in this batch

    @property
    def sequences(self) -> Sequences:
        """Which token belongs to which trajectory."""
        return Sequences(self.sequence, self.num_sequences)

    @property
    def turns(self) -> Sequences:
        """Which token belongs to which turn; a turn is in one trajectory."""
        return self.sequences if self.turn is None else Sequences(self.turn, self.num_turns)

    def to(self, device: torch.device) -> MicroBatch:
        """Move every tensor to a device."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: v.to(device) for n, v in held.items() if isinstance(v, Tensor)})


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

    Raises:
        BatchDoesNotFit: A row alone is longer than the budget.
    """
    shared = list(prompts) or [None] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if order and lengths[order[0]] > budget_tokens:
        raise BatchDoesNotFit(
            f"a trajectory of {lengths[order[0]]} tokens does not fit into trainer.micro_batch_tokens = "
            f"{budget_tokens}; raise it, or lower rollout.max_new_tokens or data.max_prompt_tokens"
        )
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


def build(rows: Sequence[Row]) -> MicroBatch:
    """Build the tensors of one micro-batch; without rows it contributes nothing to the gradient."""
    sampled = [np.flatnonzero(row.loss_mask) for row in rows]
    layout = _shared_prompts(rows, sampled) or _row_by_row(rows, sampled)

    counts = [len(where) for where in sampled]

    def each(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """Give every sampled token the value of its trajectory."""
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), counts)).to(dtype)

    def taken(values: Callable[[Row], npt.NDArray[Any]], dtype: torch.dtype = torch.float32) -> Tensor:
        """Give every sampled token its own value of an array over the trajectory."""
        return _flat([values(row)[where] for row, where in zip(rows, sampled, strict=True)], dtype)

    num_turns = [max(1, len(row.turns)) for row in rows]
    firsts = np.cumsum([0, *num_turns])
    turn = None
    if max(num_turns, default=1) > 1:
        numbers = [
            first + (row.by_turn(range(len(row.turns))) if row.turns else np.zeros(count))
            for row, first, count in zip(rows, firsts, counts, strict=False)
        ]
        turn = _flat(numbers, torch.int64)
    advantages = each([row.advantage for row in rows])
    if any(len(row.turn_advantages) for row in rows):
        advantages = _flat(
            [
                row.by_turn(row.turn_advantages) if len(row.turn_advantages) else np.full(count, row.advantage)
                for row, count in zip(rows, counts, strict=True)
            ],
            torch.float32,
        )
    return MicroBatch(
        input_ids=torch.from_numpy(layout.input_ids),
        predictors=_flat(layout.predictors, torch.int64),
        targets=taken(lambda row: row.token_ids, torch.int64),
        behaviour_logprobs=taken(lambda row: row.behaviour_logprobs),
        advantages=advantages,
        weights=each([row.weight for row in rows]),
        sequence=each(range(len(rows)), torch.int64),
        ages=taken(lambda row: np.zeros(len(row.token_ids)) if row.ages is None else row.ages),
        sft_weights=each([row.sft_weight for row in rows]),
        num_sequences=max(1, len(rows)),
        turn=turn,
        num_turns=int(firsts[-1]),
        position_ids=None if layout.position_ids is None else torch.from_numpy(layout.position_ids),
        attention_mask=None if layout.attention_mask is None else torch.from_numpy(layout.attention_mask[:, None]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Position of every token of a micro-batch."""

    input_ids: npt.NDArray[np.int64]  # [R, T]
    predictors: list[npt.NDArray[np.int64]]  # for each trajectory, the flat positions that predict its tokens
    position_ids: npt.NDArray[np.int64] | None = None  # [R, T]
    attention_mask: npt.NDArray[np.bool_] | None = None  # [R, T, T]


def _row_by_row(rows: Sequence[Row], sampled: Sequence[npt.NDArray[np.int64]]) -> _Layout:
    longest = max((len(row.token_ids) - 1 for row in rows), default=1)  # the last token predicts nothing
    input_ids = np.zeros((max(1, len(rows)), longest), dtype=np.int64)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.token_ids) - 1] = row.token_ids[:-1]
    return _Layout(input_ids, [number * longest + where - 1 for number, where in enumerate(sampled)])


def _shared_prompts(rows: Sequence[Row], sampled: Sequence[npt.NDArray[np.int64]]) -> _Layout | None:
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
    return _Layout(input_ids, predictors, position_ids, mask)


def _flat(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)
