"""Columns of a pack whose groups have a teacher's log-probabilities, beside those of every pack; pure.

The lists of a row are about its sampled tokens, in their order: one log-probability each, and ``teacher_top_k`` likeliest tokens
each, one token after another. The rows of a group without a teacher in the same pack have ``teacher`` "" and empty lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.protocol.errors import PackError
from penstock.protocol.packs.pack_rows import Rows, list_of, lists
from penstock.protocol.token_annotations import TeacherRow, TeacherScores
from penstock.protocol.trajectory import Group, Trajectory

FIELDS = (
    pa.field("teacher", pa.string(), nullable=False),  # which model of which version; "": none
    pa.field("teacher_top_k", pa.int32(), nullable=False),
    pa.field("teacher_logprobs", list_of(pa.float32()), nullable=False),
    pa.field("teacher_top_ids", list_of(pa.int32()), nullable=False),
    pa.field("teacher_top_logprobs", list_of(pa.float32()), nullable=False),
)
_NONE = TeacherRow(np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


def columns(groups: Sequence[Group]) -> list[Any]:
    for group in groups:
        if group.teacher is not None:
            group.teacher.check(num_sampled(group.trajectories), None)
    teacher_rows = [
        (group.teacher, row)
        for group in groups
        for row in (group.teacher.rows if group.teacher is not None else [_NONE] * len(group.trajectories))
    ]
    return [
        pa.array([teacher.model if teacher is not None else "" for teacher, _ in teacher_rows], pa.string()),
        pa.array([teacher.top_k if teacher is not None else 0 for teacher, _ in teacher_rows], pa.int32()),
        lists([row.logprobs for _, row in teacher_rows], pa.float32()),
        lists([row.top_ids.reshape(-1) for _, row in teacher_rows], pa.int32()),
        lists([row.top_logprobs.reshape(-1) for _, row in teacher_rows], pa.float32()),
    ]


def of_groups(rows: Rows, trajectories: Sequence[Trajectory], vocab_size: int | None) -> list[TeacherScores | None]:
    if "teacher" not in rows.table.column_names:
        return [None] * (len(rows.starts) - 1)
    logprobs, at = rows.lists("teacher_logprobs")
    (ids, ids_at), (tops, tops_at) = rows.lists("teacher_top_ids"), rows.lists("teacher_top_logprobs")
    found: list[TeacherScores | None] = []
    for model, top_k, (start, end) in zip(
        rows.of_groups("teacher"), rows.of_groups("teacher_top_k"), itertools.pairwise(rows.starts), strict=True
    ):
        if not model:
            if at[end] > at[start] or ids_at[end] > ids_at[start] or tops_at[end] > tops_at[start]:
                raise PackError("log-probabilities of a teacher without a name")
            found.append(None)
            continue
        members = []
        for row in range(start, end):
            shape = (at[row + 1] - at[row], top_k)
            sizes = (ids_at[row + 1] - ids_at[row], tops_at[row + 1] - tops_at[row])
            if top_k < 0 or sizes != (shape[0] * top_k,) * 2:
                raise PackError(f"a teacher's {sizes} likeliest tokens, expected {top_k} for each of {shape[0]}")
            members.append(
                TeacherRow(
                    logprobs[at[row] : at[row + 1]],
                    ids[ids_at[row] : ids_at[row + 1]].reshape(shape),
                    tops[tops_at[row] : tops_at[row + 1]].reshape(shape),
                )
            )
        teacher = TeacherScores(model, top_k, tuple(members))
        teacher.check(num_sampled(trajectories[start:end]), vocab_size)
        found.append(teacher)
    return found


def num_sampled(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return how many tokens of each trajectory a teacher is asked about: the sampled ones, none of a baseline."""
    return [0 if trajectory.is_baseline else trajectory.num_completion_tokens for trajectory in trajectories]
