"""From a plan to the tensors of one rank's micro-batches, in one pass: groups, rows, packed tensors, images.

A rank fetches the packs of its own rows and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PackError
from penstock.protocol.facts import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group, Trajectory
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.learner.image_reader import ImageReader
from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan, placed_images

Place = tuple[int, int]  # of a group: number of its pack in the plan, and row group


class PackStore(Protocol):
    """Where packs are: the object store of a run, or the folder of a saved batch."""

    def get(self, ref: BlobRef) -> bytes: ...


def groups_of(plan: StepPlan, share: int, ready: Iterable[ReadyGroup], packs: PackStore) -> dict[Place, Group]:
    """Return the groups that are ``ready``, and those of one share of the rows that are not, fetched from ``packs``."""
    numbers = {reference.key: number for number, reference in enumerate(plan.packs)}
    found = {(numbers[one.pack.key], one.scored.generated.row_group): one.group for one in ready}
    rows = [plan.rows[number] for numbers_of_rows in plan.micro_batches[share] for number in numbers_of_rows]
    missing: dict[int, set[int]] = {}
    for row in rows:
        if (row.pack, row.row_group) not in found:
            missing.setdefault(row.pack, set()).add(row.row_group)
    for pack, row_groups in missing.items():
        order = sorted(row_groups)
        groups = group_pack.decode(packs.get(plan.packs[pack]), order)
        found |= {(pack, row_group): group for row_group, group in zip(order, groups, strict=True)}
    return found


def micro_batches_of(
    plan: StepPlan, share: int, groups: Mapping[Place, Group], images: ImageReader | None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one share of the rows, in the plan's order; the patches of images are computed when read.

    Raises PackError for rows with images where none can be read.
    """
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
                ages=_ages(trajectory, plan.version, plan.least_age),
                sft_weight=planned.sft_weight,
                turns=[(turn.start, turn.end) for turn in group.turns[planned.trajectory]],
                turn_advantages=planned.turn_advantages,
                teacher=group.teacher.rows[planned.trajectory] if group.teacher is not None else None,
                experts=trajectory.experts.ids if trajectory.experts is not None else None,
                images=placed_images(trajectory, plan.packs[planned.pack]),
            )
        )
    return rows


def _ages(trajectory: Trajectory, version: int, least: int) -> npt.NDArray[np.int32]:
    """Return each token's age in versions, [T]; 0 where the policy did not sample it."""
    ages = np.zeros(len(trajectory.token_ids), dtype=np.int32)
    for run in trajectory.version_runs:
        ages[run.start : run.end] = max(least, version - run.version)
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
