"""What one step trains on, as rank 0 decided it: which rows of which packs, with what advantage; pure.

A plan holds no tokens: every rank reads the rows of its micro-batches from the packs, so a plan is small for any
number of ranks. A plan and the packs that it names are enough to make the same step again.

A batch may have several optimizer steps. Its groups are split once, and every pass takes the mini-batches in a separate order: a mini-batch
has the same micro-batches in every pass, and the log-probabilities computed before the first optimizer step fit all of them. Split and orders
follow from ``run.seed`` and the step alone, so a resumed run and a replay make the same.

Every rank builds the tensors of its micro-batches in one pass from the plan: groups, rows, packed tensors, images.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.protocol import blob_keys
from penstock.protocol.errors import PackError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group, Trajectory
from penstock.trainer.algorithm.aggregation import Aggregation, Denominators, sequence_weight
from penstock.trainer.algorithm.batch import MicroBatch, PlacedImages, Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.credit import Credit, CreditRule, Scored
from penstock.trainer.algorithm.packed_rows import NO_PAIR_COST, PairCost
from penstock.trainer.learner.vision import ImageReader

NO_AGES: Mapping[int, int] = MappingProxyType({})  # each is the difference of the versions' numbers
T = TypeVar("T")
Place = tuple[int, int]  # of a group: number of its pack in the plan, and row group


@dataclass(frozen=True, slots=True)
class Passes:
    groups: tuple[tuple[int, ...], ...]  # of each mini-batch, by their place in the batch, ascending
    orders: tuple[tuple[int, ...], ...]  # of each pass: numbers of mini-batches
    stop_kl: float | None = None  # no further pass once the KL to the proximal policy was above this in one
    sizes: tuple[int, ...] = ()  # micro-batches of each mini-batch, the same on every rank

    def cut(self, micro_batches: Sequence[Any]) -> list[Sequence[Any]]:
        ends = [sum(self.sizes[: number + 1]) for number in range(len(self.sizes))]
        return [micro_batches[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]

    def is_exceeded(self, kl: float) -> bool:
        return self.stop_kl is not None and not kl <= self.stop_kl  # a NaN is above every limit

    def updates(self, num_passes: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.groups[number] for order in self.orders[:num_passes] for number in order)


def plan_passes(
    groups: Sequence[int], *, epochs: int, minibatches: int, seed: int, step: int, stop_kl: float | None = None
) -> Passes:
    """Split the places of groups into mini-batches whose sizes differ by at most 1, and order these for every pass."""
    shuffled = _shuffled(groups, f"{seed}.{step}")
    count = max(1, min(minibatches, len(shuffled)))
    edges = [len(shuffled) * number // count for number in range(count + 1)]
    parts = tuple(tuple(sorted(shuffled[start:end])) for start, end in pairwise(edges))
    first = tuple(range(count))  # the groups are in a random order already
    orders = [first, *(tuple(_shuffled(first, f"{seed}.{step}.{number}")) for number in range(1, epochs))]
    return Passes(parts, tuple(orders), stop_kl)


def _shuffled(values: Sequence[int], key: str) -> list[int]:
    """Return the values in the order of their hashes under a key: the same with every version of every library."""
    return sorted(values, key=lambda value: hashlib.sha256(f"{key}:{value}".encode()).digest())


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    scored: ScoredGroup
    pack: BlobRef
    group: Group

    @property
    def group_id(self) -> str:
        return self.scored.generated.group_id

    @property
    def num_tokens(self) -> int:
        return sum(self.scored.generated.completion_tokens)

    @property
    def trained(self) -> Scored:
        summary, rewards = self.scored.generated, self.scored.rewards
        num = summary.num_trained
        return Scored(
            rewards[:num],
            summary.completion_tokens[:num],
            [reason == "length" for reason in summary.finish_reasons[:num]],
            self.group.reward.data_source,
            baseline=(rewards[-1], summary.completion_tokens[-1]) if summary.has_baseline else None,
            turns=[episode.turns for episode in self.group.episodes[:num]],
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    budget_tokens: int  # most tokens of a micro-batch
    num_shares: int = 1  # shares of the rows, one for each rank that computes rows
    pair_cost: PairCost = NO_PAIR_COST
    padded: bool = False  # the model cannot compute rows as one stream


@dataclass(frozen=True, slots=True)
class PlannedRow:
    pack: int  # number in the plan's list of packs
    row_group: int
    trajectory: int  # row of the group
    advantage: float
    weight: float  # in the loss, of each of its sampled tokens
    sft_weight: float = 0.0  # in the added cross-entropy, of each of its sampled tokens
    turn_advantages: tuple[float, ...] = ()  # of the row's turns, where they differ; none: ``advantage`` is that of all


@dataclass(frozen=True, slots=True)
class StepPlan:
    packs: tuple[BlobRef, ...]
    rows: tuple[PlannedRow, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]  # [share][micro-batch] = row numbers
    version: int = 0  # of the weights that are trained; a token's age is counted from it
    skipped: tuple[tuple[str, int], ...] = ()  # number of trajectories that filters removed, by reason
    token_kl: float = 0.0  # coefficient of the KL in every token's reward, in a run with a critic
    least_age: int = 0  # of any token: 1 if no version of this run sampled it
    ages: tuple[tuple[int, int], ...] = ()  # of versions whose age is not ``version`` minus their number
    kl_coefficient: float | None = None  # of the KL in the loss, if it is adaptive; None: that of the objective
    passes: Passes | None = (
        None  # the optimizer steps, in the order of each share's micro-batches; None: one step, or none without rows
    )


def make_plan(
    groups: Sequence[ReadyGroup],
    *,
    credit: CreditRule,
    aggregation: Aggregation,
    max_completion_tokens: int,
    capacity: Capacity,
    version: int = 0,
    sft_coefficient: float = 0.0,
    split: Callable[[Sequence[int]], Passes] | None = None,
) -> StepPlan:
    """Return the plan of one step: advantages, weights over the whole batch, and rows split over the ranks.

    Advantages, weights and denominators are those of trajectories; all rows of an episode have the episode's. With ``split``,
    advantages are still those of the whole batch, and weights those of each mini-batch.

    Args:
        groups: The batch; the order of the plan's rows follows it.
        credit: Advantages, filters and sample weights (`trainer/algorithm/credit.py`).
        aggregation: How tokens and sequences are weighted.
        max_completion_tokens: The constant L of `seq-mean-token-sum-norm`.
        capacity: What micro-batches are cut for.
        version: Version of the weights that are trained.
        sft_coefficient: Weight of the cross-entropy on rewarded trajectories.
        split: Returns the optimizer steps for the groups that have a trajectory to train on; None: one step.

    Raises:
        BatchDoesNotFit: A trajectory is longer than a micro-batch may be.
    """
    scored = [group.trained for group in groups]
    batch_credit = credit(scored)
    counts = [n for group in scored for n in group.lengths]
    kept = [n if w > 0 else 0 for n, w in zip(counts, batch_credit.weights, strict=True)]
    by_group = _sums(scored, kept)
    trained = _sums(scored, [int(weight > 0.0) for weight in batch_credit.weights])
    passes = split([place for place, num in enumerate(trained) if num]) if split and any(trained) else None
    parts = passes.groups if passes else (tuple(range(len(groups))),)
    part_of = {group: number for number, part in enumerate(parts) for group in part}
    totals = [_totals(part, scored, kept, batch_credit.rewards, max_completion_tokens) for part in parts]
    packs: dict[str, int] = {}
    references: list[BlobRef] = []
    rows: list[PlannedRow] = []
    planned: list[tuple[Trajectory, BlobRef]] = []
    rows_of_part: list[list[int]] = [[] for _ in parts]
    position = 0
    for group_number, (group, prompt_tokens) in enumerate(zip(groups, by_group, strict=True)):
        if group.pack.key not in packs:
            packs[group.pack.key] = len(references)
            references.append(group.pack)
        summary = group.scored.generated
        turns = group.group.turns
        for own_rows in group.group.rows_of[: summary.num_trained]:
            factor, reward = batch_credit.weights[position], batch_credit.rewards[position]
            if factor > 0.0:
                denominators, success_tokens = totals[part_of[group_number]]
                weight = factor * sequence_weight(
                    aggregation, max(1, kept[position]), denominators, prompt_tokens=max(1, prompt_tokens)
                )
                sft = sft_coefficient / success_tokens if sft_coefficient and reward > 0 and success_tokens else 0.0
                for place in own_rows:
                    rows_of_part[part_of[group_number]].append(len(rows))
                    by_turn = batch_credit.of_turns(position, [turn.number for turn in turns[place]])
                    advantage = batch_credit.advantages[position]
                    rows.append(
                        PlannedRow(packs[group.pack.key], summary.row_group, place, advantage, weight, sft, by_turn)
                    )
                    planned.append((group.group.trajectories[place], group.pack))
            position += 1
    micro_batches: list[list[tuple[int, ...]]] = [[] for _ in range(capacity.num_shares)]
    for part in rows_of_part:
        cut = _micro_batches([planned[row] for row in part], capacity)
        for share, pieces in zip(micro_batches, cut, strict=True):
            share += [tuple(part[place] for place in piece) for piece in pieces]
        if passes:
            passes = replace(passes, sizes=(*passes.sizes, len(cut[0])))
    skipped = tuple(sorted((str(reason), count) for reason, count in batch_credit.skipped.items()))
    shares = tuple(map(tuple, micro_batches))
    return StepPlan(tuple(references), tuple(rows), shares, version, skipped, passes=passes)


def _micro_batches(
    planned: Sequence[tuple[Trajectory, BlobRef]], capacity: Capacity
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    rows = [row for row, _ in planned]
    tokens = [row.token_ids for row in rows]
    cut = plan_micro_batches(
        list(map(len, tokens)),
        budget_tokens=capacity.budget_tokens,
        num_ranks=capacity.num_shares,
        prefixes=prefixes_of(
            tokens,
            [row.loss_mask for row in rows],
            [row.experts and row.experts.ids for row in rows],
            [placed_images(row, pack) for row, pack in planned],
        ),
        pair_cost=capacity.pair_cost,
        padded=capacity.padded,
    )
    return tuple(tuple(tuple(micro_batch) for micro_batch in share) for share in cut)


def all_rows(groups: Sequence[ReadyGroup], capacity: Capacity) -> StepPlan:
    return make_plan(groups, credit=_equal_credit, aggregation="token-sum", max_completion_tokens=1, capacity=capacity)


def trajectories_alone(groups: Sequence[ReadyGroup], capacity: Capacity) -> StepPlan:
    """Plan all rows, those of each trajectory as a micro-batch, over the budget or not."""
    plan, num = all_rows(groups, capacity), capacity.num_shares
    of_trajectories = _of_trajectories(groups, range(len(plan.rows)))
    return replace(plan, micro_batches=tuple(tuple(of_trajectories[share::num]) for share in range(num)))


def row_by_row(plan: StepPlan) -> StepPlan:
    return replace(plan, micro_batches=tuple(tuple((n,) for rows in own for n in rows) for own in plan.micro_batches))


def by_trajectory(groups: Sequence[ReadyGroup], values: Sequence[float]) -> list[float]:
    return list(map(sum, _of_trajectories(groups, values)))


def _of_trajectories(groups: Sequence[ReadyGroup], values: Sequence[T]) -> list[tuple[T, ...]]:
    """Return the values of all rows by trajectory."""
    remaining = iter(values)
    return [
        tuple(islice(remaining, len(rows)))
        for group in groups
        for rows in group.group.rows_of[: group.scored.generated.num_trained]
    ]


def _equal_credit(groups: Sequence[Scored]) -> Credit:
    rewards = [reward for group in groups for reward in group.rewards]
    return Credit([0.0] * len(rewards), [1.0] * len(rewards), rewards, Counter())


def _totals(
    part: Sequence[int], groups: Sequence[Scored], counts: Sequence[int], rewards: Sequence[float], longest: int
) -> tuple[Denominators, int]:
    pairs = iter(zip(counts, rewards, strict=True))
    by_group = [[next(pairs) for _ in group.lengths] for group in groups]
    chosen = [pair for place in part for pair in by_group[place]]
    denominators = Denominators(
        max(1, sum(n for n, _ in chosen)),
        max(1, sum(n > 0 for n, _ in chosen)),
        longest,
        max(1, sum(any(n > 0 for n, _ in by_group[place]) for place in part)),
    )
    return denominators, sum(n for n, reward in chosen if reward > 0)


def _sums(groups: Sequence[Scored], counts: Sequence[int]) -> list[int]:
    remaining = iter(counts)
    return [sum(next(remaining) for _ in group.lengths) for group in groups]


def placed_images(trajectory: Trajectory, pack: BlobRef) -> PlacedImages | None:
    return None if trajectory.images is None else PlacedImages(blob_keys.owner_of_pack(pack.key), trajectory.images)


class PackStore(Protocol):
    def get(self, ref: BlobRef) -> bytes: ...


def groups_of(plan: StepPlan, share: int, ready: Iterable[ReadyGroup], packs: PackStore) -> dict[Place, Group]:
    numbers = {reference.key: number for number, reference in enumerate(plan.packs)}
    by_place = {
        (numbers[ready_group.pack.key], ready_group.scored.generated.row_group): ready_group.group
        for ready_group in ready
    }
    rows = [plan.rows[number] for numbers_of_rows in plan.micro_batches[share] for number in numbers_of_rows]
    missing: dict[int, set[int]] = {}
    for row in rows:
        if (row.pack, row.row_group) not in by_place:
            missing.setdefault(row.pack, set()).add(row.row_group)
    for pack, row_groups in missing.items():
        order = sorted(row_groups)
        groups = group_pack.decode(packs.get(plan.packs[pack]), order)
        by_place |= {(pack, row_group): group for row_group, group in zip(order, groups, strict=True)}
    return by_place


def micro_batches_of(
    plan: StepPlan, share: int, groups: Mapping[Place, Group], images: ImageReader | None
) -> Iterator[MicroBatch]:
    """Yield one share's micro-batches in the plan's order; raises PackError for unreadable images."""
    for numbers in plan.micro_batches[share]:
        rows = rows_of(plan, numbers, groups)
        batch = build(rows)
        if batch.images is None:
            yield batch
            continue
        if images is None:
            raise PackError(
                f"{len(batch.images.images)} images in the rows of {plan.packs[plan.rows[numbers[0]].pack].key}, and the model reads text "
                "alone; train on them with the model that sampled them"
            )
        for processor in {row.images.images.processor for row in rows if row.images is not None}:
            images.fetch(batch.images.images, processor)
        yield replace(batch, images=replace(batch.images, read=images.patches))


def rows_of(plan: StepPlan, micro_batch: Sequence[int], groups: Mapping[Place, Group]) -> list[Row]:
    rows = []
    for number in micro_batch:
        planned = plan.rows[number]
        group = groups[planned.pack, planned.row_group]
        trajectory = group.trajectories[planned.trajectory]
        rows.append(
            Row(
                token_ids=trajectory.token_ids,
                loss_mask=trajectory.loss_mask,
                behaviour_logprobs=trajectory.behaviour_logprobs,
                advantage=planned.advantage,
                weight=planned.weight,
                ages=_ages(trajectory, plan),
                sft_weight=planned.sft_weight,
                turns=[(turn.start, turn.end) for turn in group.turns[planned.trajectory]],
                turn_advantages=planned.turn_advantages,
                teacher=group.teacher.rows[planned.trajectory] if group.teacher is not None else None,
                experts=trajectory.experts.ids if trajectory.experts is not None else None,
                images=placed_images(trajectory, plan.packs[planned.pack]),
            )
        )
    return rows


def _ages(trajectory: Trajectory, plan: StepPlan) -> npt.NDArray[np.int32]:
    """Return each token's age in versions, [T]; 0 where the policy did not sample it."""
    ages, other = np.zeros(len(trajectory.token_ids), dtype=np.int32), dict(plan.ages)
    for run in trajectory.version_runs:
        ages[run.start : run.end] = max(plan.least_age, other.get(run.version, plan.version - run.version))
    return ages


def check_taught(groups: Iterable[Group], *, with_top: bool) -> None:
    for group in groups:
        if group.teacher is None or (with_top and not group.teacher.top_k):
            lacks = (
                "no teacher's log-probabilities" if group.teacher is None else "none of the teacher's likeliest tokens"
            )
            raise PackError(
                f"group {group.group_id} has {lacks}, which the algorithm needs; train on groups of a run whose section "
                "[teacher] asked for them"
            )
