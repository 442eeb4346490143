"""From trajectories with advantages to micro-batches of tensors, shared out over the ranks; pure.

Rank 0 plans which rows go into which micro-batch of which rank (`plan_micro_batches`), every rank
builds its own (`build`). Rows are padded on the right and need no attention mask: a causal model
never looks there, and the padding's outputs are never read.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.errors import BatchDoesNotFit


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory as the loss sees it."""

    token_ids: npt.NDArray[np.int32]  # [T] prompt then completion
    loss_mask: npt.NDArray[np.bool_]  # [T] True where the policy sampled the token; never at position 0
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]; all 0.0 for supervised rows
    advantage: float
    weight: float  # of each sampled token in the loss (`trainer/aggregation.py`)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass needs; R rows padded to T tokens, N sampled tokens."""

    input_ids: Tensor  # [R, T] int64, each row without its last token
    predictors: Tensor  # [N] int64, flat position whose output predicts the sampled token
    targets: Tensor  # [N] int64
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32

    def to(self, device: torch.device) -> MicroBatch:
        """Move every tensor to a device."""
        return MicroBatch(
            self.input_ids.to(device),
            self.predictors.to(device),
            self.targets.to(device),
            self.behaviour_logprobs.to(device),
            self.advantages.to(device),
            self.weights.to(device),
        )


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
    longest = max((len(row.token_ids) - 1 for row in rows), default=1)  # the last token predicts nothing
    input_ids = np.zeros((max(1, len(rows)), longest), dtype=np.int64)
    predictors, targets, behaviour, advantages, weights = [], [], [], [], []
    for number, row in enumerate(rows):
        input_ids[number, : len(row.token_ids) - 1] = row.token_ids[:-1]
        sampled = np.flatnonzero(row.loss_mask)
        predictors.append(number * longest + sampled - 1)
        targets.append(row.token_ids[sampled])
        behaviour.append(row.behaviour_logprobs[sampled])
        advantages.append(np.full(len(sampled), row.advantage))
        weights.append(np.full(len(sampled), row.weight))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        predictors=_flat(predictors, torch.int64),
        targets=_flat(targets, torch.int64),
        behaviour_logprobs=_flat(behaviour, torch.float32),
        advantages=_flat(advantages, torch.float32),
        weights=_flat(weights, torch.float32),
    )


def _flat(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)
