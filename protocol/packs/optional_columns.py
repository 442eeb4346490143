"""Columns that only some packs have, beside those of every pack: images, a teacher's log-probabilities, experts; pure.

Images: a row has six numbers for each, in the order of its tokens: position and number of its tokens, the three sides of its grid of patches,
and the bytes of the object that `image_sha256` names. The images of tokens that a row of an episode shares with an earlier one are stored with
both. The rows without an image, in the same pack, have empty lists, and no processor.

A teacher: the lists of a row are about its sampled tokens, in their order: one log-probability each, and ``teacher_top_k`` likeliest tokens
each, one token after another. The rows of a group without a teacher in the same pack have ``teacher`` "" and empty lists.

Experts: a row has the choices of all its tokens but the last as bytes: `ExpertChoices.ids`, 8 or 16 bits each (little endian). Those of its
first ``experts_shared`` tokens, usually the prompt's, are the same as in an earlier row and stored there only: that row is the parent of an
episode's row which has one, else the group's first. The rows of a group without any, in the same pack, have zeros and no bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from penstock.protocol.errors import PackError
from penstock.protocol.groups import ImageRef, RouterShape, RowImages
from penstock.protocol.packs.pack_rows import Rows, list_of, lists
from penstock.protocol.token_annotations import ExpertChoices, TeacherRow, TeacherScores, dtype_of
from penstock.protocol.trajectory import Group, Trajectory

IMAGE_FIELDS = (
    pa.field("image_processor", pa.string(), nullable=False),  # "": the row has no image
    pa.field("image_numbers", list_of(pa.int64()), nullable=False),
    pa.field("image_sha256", list_of(pa.string()), nullable=False),
)
_NUMBERS_OF_IMAGE = 6
TEACHER_FIELDS = (
    pa.field("teacher", pa.string(), nullable=False),  # which model of which version; "": none
    pa.field("teacher_top_k", pa.int32(), nullable=False),
    pa.field("teacher_logprobs", list_of(pa.float32()), nullable=False),
    pa.field("teacher_top_ids", list_of(pa.int32()), nullable=False),
    pa.field("teacher_top_logprobs", list_of(pa.float32()), nullable=False),
)
_NO_TEACHER = TeacherRow(np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
EXPERTS = "experts"
MAX_EXPANDED_BYTES = 4 * 1024**3  # of the choices of a group's rows, those that rows share counted in each
EXPERT_FIELDS = (
    pa.field("expert_layers", pa.int32(), nullable=False),  # 0: the group does not say
    pa.field("expert_top_k", pa.int32(), nullable=False),
    pa.field("num_experts", pa.int32(), nullable=False),
    pa.field("experts_shared", pa.int32(), nullable=False),
    pa.field(EXPERTS, pa.binary(), nullable=False),
)


def image_columns(groups: Sequence[Group]) -> list[pa.Array]:
    row_images = [row.images for group in groups for row in group.trajectories]
    refs = [images.refs if images is not None else () for images in row_images]
    numbers = [[(r.position, r.num_tokens, *r.grid_thw, r.size_bytes) for r in some] for some in refs]
    return [
        pa.array([images.processor if images is not None else "" for images in row_images], pa.string()),
        lists([np.array(some, dtype=np.int64).reshape(-1) for some in numbers], pa.int64()),
        lists([np.array([ref.sha256 for ref in some], dtype=object) for some in refs], pa.string()),
    ]


def images_of_rows(rows: Rows) -> list[RowImages | None]:
    if "image_processor" not in rows.table.column_names:
        return [None] * rows.starts[-1]
    values, at = rows.lists("image_numbers")
    hashes, hashes_at = rows.lists("image_sha256")
    numbers = values.tolist()
    images: list[RowImages | None] = []
    for row, processor in enumerate(rows.values("image_processor")):
        row_numbers = numbers[at[row] : at[row + 1]]
        names = hashes[hashes_at[row] : hashes_at[row + 1]].tolist()
        if len(row_numbers) != _NUMBERS_OF_IMAGE * len(names) or bool(row_numbers) != bool(processor):
            raise PackError(
                f"a row has {len(row_numbers)} numbers and {len(names)} names of images, and the processor {processor[:80]!r}; "
                f"expected {_NUMBERS_OF_IMAGE} numbers and a name for each image, and a processor if there is one"
            )
        images.append(_images(processor, row_numbers, names) if row_numbers else None)
    return images


def _images(processor: str, numbers: Sequence[int], names: Sequence[Any]) -> RowImages:
    values = iter(numbers)
    sixes = zip(values, values, values, values, values, values, names, strict=True)
    try:
        return RowImages(
            processor=processor,
            refs=tuple(
                [
                    ImageRef(position=at, num_tokens=count, grid_thw=(t, h, w), sha256=name, size_bytes=size)
                    for at, count, t, h, w, size, name in sixes
                ]
            ),
        )
    except ValidationError as err:
        raise PackError(f"a row's images: {err.errors()[0]['msg']}") from None


def teacher_columns(groups: Sequence[Group]) -> list[Any]:
    for group in groups:
        if group.teacher is not None:
            group.teacher.check(num_sampled(group.trajectories), None)
    teacher_rows = [
        (group.teacher, row)
        for group in groups
        for row in (group.teacher.rows if group.teacher is not None else [_NO_TEACHER] * len(group.trajectories))
    ]
    return [
        pa.array([teacher.model if teacher is not None else "" for teacher, _ in teacher_rows], pa.string()),
        pa.array([teacher.top_k if teacher is not None else 0 for teacher, _ in teacher_rows], pa.int32()),
        lists([row.logprobs for _, row in teacher_rows], pa.float32()),
        lists([row.top_ids.reshape(-1) for _, row in teacher_rows], pa.int32()),
        lists([row.top_logprobs.reshape(-1) for _, row in teacher_rows], pa.float32()),
    ]


def teachers_of_groups(
    rows: Rows, trajectories: Sequence[Trajectory], vocab_size: int | None
) -> list[TeacherScores | None]:
    if "teacher" not in rows.table.column_names:
        return [None] * (len(rows.starts) - 1)
    logprobs, at = rows.lists("teacher_logprobs")
    (ids, ids_at), (tops, tops_at) = rows.lists("teacher_top_ids"), rows.lists("teacher_top_logprobs")
    teachers: list[TeacherScores | None] = []
    for model, top_k, (start, end) in zip(
        rows.of_groups("teacher"), rows.of_groups("teacher_top_k"), itertools.pairwise(rows.starts), strict=True
    ):
        if not model:
            if at[end] > at[start] or ids_at[end] > ids_at[start] or tops_at[end] > tops_at[start]:
                raise PackError("log-probabilities of a teacher without a name")
            teachers.append(None)
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
        teachers.append(teacher)
    return teachers


def num_sampled(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return how many tokens of each trajectory a teacher is asked about: the sampled ones, none of a baseline."""
    return [0 if trajectory.is_baseline else trajectory.num_completion_tokens for trajectory in trajectories]


def expert_columns(groups: Sequence[Group]) -> list[Any]:
    shapes, shared, stored = [], [], []
    for group in groups:
        if group.routers is not None:
            _check_size(group.routers, [len(row.token_ids) for row in group.trajectories])
        for row, earlier in zip(group.trajectories, _earlier_rows(group), strict=True):
            same = 0
            if row.experts is None:
                stored.append(b"")
            else:
                other = None if earlier is None else group.trajectories[earlier].experts
                same = 0 if other is None else _same(other.ids, row.experts.ids)
                stored.append(np.ascontiguousarray(row.experts.ids[same:]).astype(_stored(row.experts.shape)).tobytes())
            shapes.append(group.routers)
            shared.append(same)
    return [
        pa.array([shape.num_layers if shape else 0 for shape in shapes], pa.int32()),
        pa.array([shape.top_k if shape else 0 for shape in shapes], pa.int32()),
        pa.array([shape.num_experts if shape else 0 for shape in shapes], pa.int32()),
        pa.array(shared, pa.int32()),
        pa.array(stored, pa.binary()),
    ]


def _earlier_rows(group: Group) -> list[int | None]:
    parents: list[int | None] = [None if not number else 0 for number in range(len(group.trajectories))]
    for place, episode in zip(group.rows_of, group.episodes, strict=False):
        for number, row in zip(place, episode.rows, strict=True):
            if row.parent is not None:
                parents[number] = place.start + row.parent
    return parents


def experts_of_rows(
    rows: Rows, lengths: Sequence[int], parents: Sequence[int] | None = None
) -> list[ExpertChoices | None]:
    """Return the choices of each row, checked; raises PackError.

    ``lengths`` are the tokens of each row, ``parents`` the number of the row that it continues, -1 for none; None: none does.
    """
    if EXPERTS not in rows.table.column_names:
        return [None] * len(lengths)
    shared, stored = rows.values("experts_shared"), rows.values(EXPERTS)
    choices: list[ExpertChoices | None] = []
    sizes = zip(*(rows.of_groups(name) for name in ("expert_layers", "num_experts", "expert_top_k")), strict=True)
    for (layers, experts, top_k), (start, end) in zip(sizes, itertools.pairwise(rows.starts), strict=True):
        if not layers:
            if any(stored[start:end]):
                raise PackError("experts of tokens in a group of a model without experts")
            choices += [None] * (end - start)
            continue
        shape = RouterShape(num_layers=layers, num_experts=experts, top_k=top_k)
        _check_size(shape, lengths[start:end])
        whole: dict[int, np.ndarray] = {}
        for row in range(start, end):
            parent = -1 if parents is None else parents[row]
            earlier = whole.get(start if parent < 0 else parent)
            whole[row] = _choices_of_row(shape, stored[row], lengths[row] - 1, shared[row], earlier)
            choices.append(ExpertChoices(shape, whole[row]))
    return choices


def _check_size(shape: RouterShape, lengths: Sequence[int]) -> None:
    if (size := sum(lengths) * shape.bytes_per_token) > MAX_EXPANDED_BYTES:
        raise PackError(
            f"the experts of {sum(lengths)} tokens in {len(lengths)} rows have {size} bytes, at most {MAX_EXPANDED_BYTES}: {shape}; "
            "lower rollout.group_size or the length of rows"
        )


def _choices_of_row(
    shape: RouterShape, stored: bytes, num_tokens: int, shared: int, earlier: np.ndarray | None
) -> np.ndarray:
    """Return the choices of a row, [num_tokens, layers, k]; ``earlier`` are those of the row that it shares some with."""
    most = min(num_tokens, 0 if earlier is None else len(earlier))
    if not 0 <= shared <= most:
        raise PackError(f"a row shares the experts of {shared} tokens with an earlier row, expected 0 to {most}")
    expected = (num_tokens - shared) * shape.bytes_per_token
    if len(stored) != expected:
        raise PackError(
            f"experts of {num_tokens - shared} tokens in {len(stored)} bytes, expected {expected}: {shape}, "
            f"{shape.bytes_per_token} bytes for each token"
        )
    new_choices = np.frombuffer(stored, _stored(shape)).astype(dtype_of(shape), copy=False)
    new_choices = new_choices.reshape(-1, shape.num_layers, shape.top_k)
    return new_choices if earlier is None or not shared else np.concatenate([earlier[:shared], new_choices])


def _stored(shape: RouterShape) -> np.dtype[np.unsignedinteger]:
    return dtype_of(shape).newbyteorder("<")


def _same(choices: np.ndarray, other: np.ndarray) -> int:
    shortest = min(len(choices), len(other))
    differ = np.flatnonzero((choices[:shortest] != other[:shortest]).any(axis=(1, 2)))
    return int(differ[0]) if len(differ) else shortest
