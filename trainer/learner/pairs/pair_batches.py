"""Micro-batches of pairs of answers, and the sums of their log-probabilities; pure.

Both answers of a pair are in one micro-batch, chosen before rejected, so that a loss on pairs needs no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches
from penstock.trainer.data.pairs import Ids, Pair


@dataclass(frozen=True, slots=True, eq=False)
class PairBatch(MicroBatch):
    """A micro-batch whose sequences are chosen, rejected, chosen, … of P pairs."""

    num_pairs: int = 0
    references: Tensor | None = None  # [2 P] float64, sums of the reference's log-probabilities
    weighting: Tensor | None = None  # [2 P] float64, factors of each answer on the loss of its pair
    gradients: Tensor | None = None  # [2, 2 P] float64, of a coupled loss to weighed and to plain sums
    loss_share: float = 0.0  # of these pairs in that loss


def plan_pairs(pairs: Sequence[Pair], *, budget_tokens: int, num_shares: int) -> list[list[list[int]]]:
    """Return ``plan[share][micro_batch]`` = numbers of pairs; the padding of both answers is within the budget."""
    return plan_micro_batches([2 * pair.longest for pair in pairs], budget_tokens=budget_tokens, num_ranks=num_shares)


def build_pairs(pairs: Sequence[Pair], references: Tensor | None = None) -> PairBatch:
    """Build the micro-batch of some pairs."""
    rows = [
        _row(pair.prompt, answer, other)
        for pair in pairs
        for answer, other in ((pair.chosen, pair.rejected), (pair.rejected, pair.chosen))
    ]
    plain = build(rows)
    held = {one.name: getattr(plain, one.name) for one in fields(MicroBatch)}
    return PairBatch(**held, num_pairs=len(pairs), references=references)


def mismatched(pairs: Sequence[Pair]) -> list[Pair]:
    """Return each prompt with the answers of the pair before it, the first with those of the last, as TRL does."""
    before = [*pairs[-1:], *pairs[:-1]]
    return [Pair(one.prompt, other.chosen, other.rejected) for one, other in zip(pairs, before, strict=True)]


def answer_sums(logprobs: Tensor, batch: PairBatch, length_alpha: float | None) -> tuple[Tensor, Tensor]:
    """Return each answer's log-probability, [2 P] float64, and the same with tokens of its tail weighed.

    The tail begins at the length of the shorter answer of a pair (LD-DPO, arXiv 2409.06411).
    """
    values = logprobs.double()
    plain = batch.sequences.sum(values)[: 2 * batch.num_pairs]
    if length_alpha is None or not batch.num_pairs:
        return plain, plain
    lengths = batch.sequences.lengths(values)
    shared = lengths.view(-1, 2).amin(dim=1).repeat_interleave(2)
    is_tail = batch.sequences.place() >= batch.sequences.spread(shared)
    weighed = torch.where(is_tail, length_alpha * values, values)
    return plain, batch.sequences.sum(weighed)


def answer_weights(collisions: Tensor, batch: PairBatch) -> Tensor:
    """Return how much of each answer the policy would have sampled itself, [2 P] float64 (WPO, arXiv 2406.11827, eq. 2).

    The exponential of the mean over its tokens of ``log p - log sum p²``; ``collisions`` are both, [2, N].
    """
    values = collisions.double()
    return batch.sequences.mean(values[0] - values[1]).exp()[: 2 * batch.num_pairs]


def answer_lengths(batch: PairBatch) -> Tensor:
    """Return the tokens of each answer, [2 P] float64."""
    return batch.sequences.lengths(batch.targets.double())[: 2 * batch.num_pairs]


def _row(prompt: Ids, answer: Ids, other: Ids) -> Row:
    """Return the row of an answer; one that is not there has no trained token, in a row that is computed anyway."""
    token_ids = np.concatenate([prompt, answer if len(answer) else other])
    length = len(token_ids)
    return Row(
        token_ids=token_ids,
        loss_mask=(np.arange(length) >= len(prompt)) & bool(len(answer)),
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        advantage=0.0,
        weight=0.0,
    )
