"""Columns that only some packs have, beside those of every pack: images, a teacher's log-probabilities, experts; pure.

Images: a row has six numbers for each, in the order of its tokens: position and number of its tokens, the three sides
of its grid of patches, and the bytes of the object that `image_sha256` names. What a row shares with an
earlier one are stored with both. Rows without an image, in the same pack, have empty lists, and no processor.

A teacher: the lists of a row are about its sampled tokens, in order: one log-probability each, and ``teacher_top_k``
likeliest tokens each. The rows of a group without a teacher in the same pack have ``teacher`` "" and empty lists.

Experts: a row has the choices of all its tokens but the last as bytes: `ExpertChoices.ids`, 8 or 16 bits each, little
endian. Those of its first ``experts_shared`` tokens, usually the prompt's, are as in an earlier row and stored there
only: that of the parent of an episode's row, else of the group's first. Rows without any have zeros and no bytes.
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
from penstock.protocol.packs.pack_rows import Column, Rows, StoredRow, column, list_of
from penstock.protocol.token_annotations import ExpertChoices, TeacherRow, TeacherScores, dtype_of
from penstock.protocol.trajectory import Group, Trajectory

EXPERTS = "experts"
MAX_EXPANDED_BYTES = 4 * 1024**3  # of the choices of a group's rows, those that rows share counted in each
_NUMBERS_OF_IMAGE = 6
_NO_TEACHER = TeacherRow(np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


def _images_of(stored: StoredRow) -> tuple[ImageRef, ...]:
    return stored.row.images.refs if stored.row.images is not None else ()


def _numbers_of_images(stored: StoredRow) -> np.ndarray:
    numbers = [(r.position, r.num_tokens, *r.grid_thw, r.size_bytes) for r in _images_of(stored)]
    return np.array(numbers, dtype=np.int64).reshape(-1)


IMAGE_COLUMNS = (
    # "": the row has no image
    column("image_processor", pa.string(), lambda stored: stored.row.images.processor if stored.row.images else ""),
    column("image_numbers", list_of(pa.int64()), _numbers_of_images),
    column(
        "image_sha256",
        list_of(pa.string()),
        lambda stored: np.array([ref.sha256 for ref in _images_of(stored)], dtype=object),
    ),
)


def _taught(stored: StoredRow) -> TeacherRow:
    return stored.group.teacher.rows[stored.index] if stored.group.teacher is not None else _NO_TEACHER


TEACHER_COLUMNS = (
    # which model of which version; "": none
    column("teacher", pa.string(), lambda stored: stored.group.teacher.model if stored.group.teacher else ""),
    column("teacher_top_k", pa.int32(), lambda stored: stored.group.teacher_top_k or 0),
    column("teacher_logprobs", list_of(pa.float32()), lambda stored: _taught(stored).logprobs),
    column("teacher_top_ids", list_of(pa.int32()), lambda stored: _taught(stored).top_ids.reshape(-1)),
    column("teacher_top_logprobs", list_of(pa.float32()), lambda stored: _taught(stored).top_logprobs.reshape(-1)),
)


def _of_routers(name: str, attribute: str) -> Column:
    return column(name, pa.int32(), lambda stored: getattr(stored.group.routers, attribute, 0))


def _choices_of(stored: StoredRow) -> bytes:
    choices = stored.row.experts
    if choices is None:
        return b""
    return np.ascontiguousarray(choices.ids[stored.experts_shared :]).astype(_stored(choices.shape)).tobytes()


EXPERT_COLUMNS = (
    _of_routers("expert_layers", "num_layers"),  # 0: the group does not say
    _of_routers("expert_top_k", "top_k"),
    _of_routers("num_experts", "num_experts"),
    column("experts_shared", pa.int32(), lambda stored: stored.experts_shared),
    column(EXPERTS, pa.binary(), _choices_of),
)


def check(group: Group) -> None:
    """Raise PackError for log-probabilities that no teacher can give, and more experts than a reader takes."""
    if group.teacher is not None:
        group.teacher.check(num_sampled(group.trajectories), None)
    if group.routers is not None:
        _check_size(group.routers, [len(row.token_ids) for row in group.trajectories])


def images_of_rows(rows: Rows) -> list[RowImages | None]:
    if not rows.has("image_processor"):
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
                f"a row has {len(row_numbers)} numbers and {len(names)} names of images, and the processor "
                f"{processor[:80]!r}; expected {_NUMBERS_OF_IMAGE} numbers and a name for each image, and a processor"
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


def teachers_of_groups(
    rows: Rows, trajectories: Sequence[Trajectory], vocab_size: int | None
) -> list[TeacherScores | None]:
    if not rows.has("teacher"):
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


def experts_of_rows(rows: Rows, lengths: Sequence[int], parents: Sequence[int]) -> list[ExpertChoices | None]:
    """Return the choices of each row, checked; raises PackError.

    ``lengths`` are the tokens of each row, ``parents`` the number of the row that it continues, -1 for none.
    """
    if not rows.has(EXPERTS):
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
            earlier = whole.get(start if parents[row] < 0 else parents[row])
            whole[row] = _choices_of_row(shape, stored[row], lengths[row] - 1, shared[row], earlier)
            choices.append(ExpertChoices(shape, whole[row]))
    return choices


def _check_size(shape: RouterShape, lengths: Sequence[int]) -> None:
    if (size := sum(lengths) * shape.bytes_per_token) > MAX_EXPANDED_BYTES:
        raise PackError(
            f"the experts of {sum(lengths)} tokens in {len(lengths)} rows have {size} bytes, at most "
            f"{MAX_EXPANDED_BYTES}: {shape}; lower rollout.group_size or the length of rows"
        )


def _choices_of_row(
    shape: RouterShape, stored: bytes, num_tokens: int, shared: int, earlier: np.ndarray | None
) -> np.ndarray:
    """Return the choices of a row, [num_tokens, layers, k]; ``earlier``: those of the row it shares some with."""
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
