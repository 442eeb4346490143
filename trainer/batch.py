"""From trajectories with advantages to micro-batches of tensors, shared out over the ranks; pure.

Rank 0 plans which rows go into which micro-batch of which rank (`plan_micro_batches`), every rank
builds its own (`build`). Rows are padded on the right and need no attention mask: a causal model
never looks there, and the padding's outputs are never read.

Where it pays, the rows of one prompt share it: the prompt stands once, the completions behind it, and
a mask lets each completion see the prompt and itself alone. The log-probabilities and gradients are
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

from trainer.errors import BatchDoesNotFit
from trainer.losses.tokens import Sequences

MAX_SHARED_TOKENS = 1024  # of a prompt with its completions: the mask grows with the square
SHARING_PAYS_BELOW = 0.8  # of the tokens computed row by row: a mask makes attention somewhat dearer


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory as the loss sees it."""

    token_ids: npt.NDArray[np.int32]  # [T] prompt then completion
    loss_mask: npt.NDArray[np.bool_]  # [T] True where the policy sampled the token; never at position 0
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]; all 0.0 for supervised rows
    advantage: float
    weight: float  # of each sampled token in the loss (`trainer/aggregation.py`)
    ages: npt.NDArray[np.int32] | None = None  # [T] versions between sampling and training; None: all 0
    sft_weight: float = 0.0  # of each sampled token in the cross-entropy that is mixed in


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass needs; R rows padded to T tokens, N sampled tokens."""

    input_ids: Tensor  # [R, T] int64, each trajectory without its last token
    predictors: Tensor  # [N] int64, flat position whose output predicts the sampled token
    targets: Tensor  # [N] int64
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, which trajectory the token belongs to
    ages: Tensor  # [N] float32, versions between sampling and training
    sft_weights: Tensor  # [N] float32, of the cross-entropy that is mixed in
    num_sequences: int  # trajectories, those without a sampled token included
    position_ids: Tensor | None = None  # [R, T] int64, where rows share prompts; None: 0, 1, 2, …
    attention_mask: Tensor | None = None  # [R, 1, T, T] bool, who sees whom; None: causal
    proximal_logprobs: Tensor | None = None  # [N] float32, recomputed before the first update on the batch
    reference_logprobs: Tensor | None = None  # [N] float32, of the frozen reference
    reference_kl: Tensor | None = None  # [N] float32, exact KL to it over the vocabulary, for rewards by token
    drift_limit: float | None = None  # largest (log current / behaviour)² that M2PO keeps, or clips at, in this batch

    @property
    def sequences(self) -> Sequences:
        """Which token belongs to which trajectory."""
        return Sequences(self.sequence, self.num_sequences)

    def to(self, device: torch.device) -> MicroBatch:
        """Move every tensor to a device."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: v.to(device) for n, v in held.items() if isinstance(v, Tensor)})


def plan_micro_batches(lengths: Sequence[int], *, budget_tokens: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Share rows out over ranks and micro-batches.

    Rows of similar length stand together, so that little is padded; every rank gets the same number
    of micro-batches (their gradients are exchanged together) and about the same number of tokens.
    A rank may get an empty micro-batch when there are fewer rows than places.

    Args:
        lengths: Tokens of each row.
        budget_tokens: Most tokens of a micro-batch, padding included.
        num_ranks: Number of ranks.

    Returns:
        ``plan[rank][micro_batch]`` = row numbers.

    Raises:
        BatchDoesNotFit: A row alone is longer than the budget.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if order and lengths[order[0]] > budget_tokens:
        raise BatchDoesNotFit(
            f"a trajectory of {lengths[order[0]]} tokens does not fit into trainer.micro_batch_tokens = "
            f"{budget_tokens}; raise it, or lower rollout.max_new_tokens or data.max_prompt_tokens"
        )
    pieces = _cut(order, lengths, budget_tokens)
    while len(pieces) % num_ranks:
        largest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
        piece = pieces.pop(largest)
        pieces += [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    return _share(pieces, lengths, num_ranks)


def _cut(order: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    pieces: list[list[int]] = []
    for row in order:  # longest first: the first row of a piece is its padded length
        if pieces and (len(pieces[-1]) + 1) * lengths[pieces[-1][0]] <= budget_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces or [[]]


def _share(pieces: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    def cost(piece: list[int]) -> int:
        return sum(lengths[row] for row in piece)

    per_rank = len(pieces) // num_ranks
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for piece in sorted(pieces, key=cost, reverse=True):  # the largest piece to the rank that has least
        load, rank = heapq.heappop(loads)
        plan[rank].append(piece)
        if len(plan[rank]) < per_rank:
            heapq.heappush(loads, (load + cost(piece), rank))
    return plan


def build(rows: Sequence[Row]) -> MicroBatch:
    """Build the tensors of one micro-batch; no rows give one that contributes nothing to the gradient."""
    sampled = [np.flatnonzero(row.loss_mask) for row in rows]
    layout = _shared_prompts(rows, sampled) or _row_by_row(rows, sampled)

    def each(value: Callable[[int, Row], float], dtype: torch.dtype = torch.float32) -> Tensor:
        """Give every sampled token a value of its trajectory."""
        parts = [np.full(len(where), value(n, row)) for n, (row, where) in enumerate(zip(rows, sampled, strict=True))]
        return _flat(parts, dtype)

    def taken(values: Callable[[Row], npt.NDArray[Any]], dtype: torch.dtype = torch.float32) -> Tensor:
        """Give every sampled token its own value of an array over the trajectory."""
        return _flat([values(row)[where] for row, where in zip(rows, sampled, strict=True)], dtype)

    return MicroBatch(
        input_ids=torch.from_numpy(layout.input_ids),
        predictors=_flat(layout.predictors, torch.int64),
        targets=taken(lambda row: row.token_ids, torch.int64),
        behaviour_logprobs=taken(lambda row: row.behaviour_logprobs),
        advantages=each(lambda _, row: row.advantage),
        weights=each(lambda _, row: row.weight),
        sequence=each(lambda number, _: number, torch.int64),
        ages=taken(lambda row: np.zeros(len(row.token_ids)) if row.ages is None else row.ages),
        sft_weights=each(lambda _, row: row.sft_weight),
        num_sequences=max(1, len(rows)),
        position_ids=None if layout.position_ids is None else torch.from_numpy(layout.position_ids),
        attention_mask=None if layout.attention_mask is None else torch.from_numpy(layout.attention_mask[:, None]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where every token of a micro-batch stands."""

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
    """Lay the rows of one prompt behind it; None where that does not pay or a row is not prompt and completion."""
    bundles: dict[bytes, list[int]] = {}
    for number, (row, where) in enumerate(zip(rows, sampled, strict=True)):
        if len(where) == 0 or where[-1] - where[0] + 1 != len(where) or where[-1] != len(row.token_ids) - 1:
            return None
        bundles.setdefault(row.token_ids[: where[0]].tobytes(), []).append(number)
    prompts = [int(sampled[members[0]][0]) for members in bundles.values()]
    lengths = [
        prompt + sum(len(sampled[number]) - 1 for number in members)
        for prompt, members in zip(prompts, bundles.values(), strict=True)
    ]
    area = len(lengths) * max(lengths, default=0)
    plain_area = len(rows) * max((len(row.token_ids) - 1 for row in rows), default=0)
    if not lengths or max(lengths) > MAX_SHARED_TOKENS or area > SHARING_PAYS_BELOW * plain_area:
        return None
    shape = (len(lengths), max(lengths))
    input_ids, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    mask = np.zeros((*shape, shape[1]), dtype=np.bool_)
    mask[:] = np.eye(shape[1], dtype=np.bool_)  # padding sees itself: a row of nothing would be NaN
    predictors: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    for place, (prompt, members) in enumerate(zip(prompts, bundles.values(), strict=True)):
        input_ids[place, :prompt] = rows[members[0]].token_ids[:prompt]
        position_ids[place, :prompt] = np.arange(prompt)
        mask[place, :prompt, :prompt] = np.tri(prompt, dtype=np.bool_)
        start = prompt
        for number in members:
            size = len(sampled[number]) - 1  # the last token predicts nothing
            end = start + size
            input_ids[place, start:end] = rows[number].token_ids[prompt:-1]
            position_ids[place, start:end] = prompt + np.arange(size)
            mask[place, start:end, :prompt] = True
            mask[place, start:end, start:end] = np.tri(size, dtype=np.bool_)
            predictors[number] = place * shape[1] + np.concatenate([[prompt - 1], np.arange(start, end)])
            start = end
    return _Layout(input_ids, predictors, position_ids, mask)


def _flat(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)
