"""What one step trains on, as rank 0 decided it: which rows of which packs, with what advantage; pure.

A plan holds no tokens. Every rank reads the rows of its own micro-batches from the packs, so the plan
of a thousand ranks is as easy to send as the plan of two; and a stored plan with the packs it names
is all it takes to make the same step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from protocol.facts import BlobRef, ScoredGroup
from protocol.trajectory import Group
from trainer.advantages import AdvantageEstimator
from trainer.aggregation import Aggregation, Denominators, sequence_weight
from trainer.batch import Row, plan_micro_batches


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """A scored group whose trajectories have been fetched and verified."""

    scored: ScoredGroup
    pack: BlobRef
    group: Group

    @property
    def group_id(self) -> str:
        """Id of the group."""
        return self.scored.generated.group_id

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all its trajectories."""
        return sum(self.scored.generated.completion_tokens)


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One trajectory of a step."""

    pack: int  # number in the plan's list of packs
    row_group: int
    trajectory: int
    advantage: float
    weight: float  # of each of its sampled tokens in the loss


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step over all ranks."""

    packs: tuple[BlobRef, ...]
    rows: tuple[PlannedRow, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][micro-batch] = row numbers

    def to_wire(self) -> list[Any]:
        """Return the plan as MessagePack types."""
        return [
            [[ref.key, ref.size_bytes, ref.sha256] for ref in self.packs],
            [[r.pack, r.row_group, r.trajectory, r.advantage, r.weight] for r in self.rows],
            [[list(rows) for rows in rank] for rank in self.micro_batches],
        ]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> StepPlan:
        """Rebuild what `to_wire` wrote."""
        packs, rows, micro_batches = wire
        return cls(
            packs=tuple(BlobRef(key=key, size_bytes=size, sha256=sha256) for key, size, sha256 in packs),
            rows=tuple(PlannedRow(*row) for row in rows),
            micro_batches=tuple(tuple(tuple(rows) for rows in rank) for rank in micro_batches),
        )


def make_plan(
    groups: Sequence[ReadyGroup],
    *,
    advantages: AdvantageEstimator,
    normalise_by_std: bool,
    aggregation: Aggregation,
    max_completion_tokens: int,
    budget_tokens: int,
    num_ranks: int,
) -> StepPlan:
    """Plan one step: advantages within each group, weights over the whole batch, rows over the ranks.

    Args:
        groups: The batch; the order of the plan's rows follows it.
        advantages: Estimator of `trainer/algorithms.py`.
        normalise_by_std: Passed to the estimator.
        aggregation: How tokens and sequences are weighed.
        max_completion_tokens: The constant L of `seq-mean-token-sum-norm`.
        budget_tokens: Most tokens of a micro-batch.
        num_ranks: Number of ranks.

    Raises:
        BatchDoesNotFit: A trajectory is longer than a micro-batch may be.
    """
    counts = [n for group in groups for n in group.scored.generated.completion_tokens]
    denominators = Denominators(sum(counts), sum(n > 0 for n in counts), max_completion_tokens)
    packs: dict[str, int] = {}
    references: list[BlobRef] = []
    rows: list[PlannedRow] = []
    lengths: list[int] = []
    for group in groups:
        if group.pack.key not in packs:
            packs[group.pack.key] = len(references)
            references.append(group.pack)
        summary = group.scored.generated
        credit = advantages(torch.tensor(group.scored.rewards, dtype=torch.float64), normalise_by_std=normalise_by_std)
        for number, (advantage, num_tokens) in enumerate(zip(credit.tolist(), summary.completion_tokens, strict=True)):
            weight = sequence_weight(aggregation, max(1, num_tokens), denominators)
            rows.append(PlannedRow(packs[group.pack.key], summary.row_group, number, advantage, weight))
            lengths.append(len(group.group.trajectories[number].token_ids))
    plan = plan_micro_batches(lengths, budget_tokens=budget_tokens, num_ranks=num_ranks)
    return StepPlan(tuple(references), tuple(rows), tuple(tuple(tuple(mb) for mb in rank) for rank in plan))


def rows_of(plan: StepPlan, micro_batch: Sequence[int], groups: Mapping[tuple[int, int], Group]) -> list[Row]:
    """Return the rows of one micro-batch; ``groups`` are keyed by pack number and row group."""
    rows = []
    for number in micro_batch:
        planned = plan.rows[number]
        trajectory = groups[planned.pack, planned.row_group].trajectories[planned.trajectory]
        rows.append(
            Row(
                token_ids=trajectory.token_ids,
                loss_mask=trajectory.loss_mask,
                behaviour_logprobs=trajectory.behaviour_logprobs,
                advantage=planned.advantage,
                weight=planned.weight,
            )
        )
    return rows
