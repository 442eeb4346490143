"""Columns of a pack whose groups say which experts computed their tokens, beside those of every pack; pure.

A row has the choices of all its tokens but the last as bytes: `ExpertChoices.ids`, 8 or 16 bits each (little endian). Those of its first
``experts_shared`` tokens, usually the prompt's, are the same as in an earlier row and stored there only: that row is the parent of an
episode's row which has one, else the group's first. The rows of a group without any, in the same pack, have zeros and no bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.protocol.errors import PackError
from penstock.protocol.facts import RouterShape
from penstock.protocol.packs.pack_rows import Rows
from penstock.protocol.token_annotations import ExpertChoices, dtype_of
from penstock.protocol.trajectory import Group

EXPERTS = "experts"
MAX_EXPANDED_BYTES = 4 * 1024**3  # of the choices of a group's rows, those that rows share counted in each
FIELDS = (
    pa.field("expert_layers", pa.int32(), nullable=False),  # 0: the group does not say
    pa.field("expert_top_k", pa.int32(), nullable=False),
    pa.field("num_experts", pa.int32(), nullable=False),
    pa.field("experts_shared", pa.int32(), nullable=False),
    pa.field(EXPERTS, pa.binary(), nullable=False),
)


def columns(groups: Sequence[Group]) -> list[Any]:
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
    found: list[int | None] = [None if not number else 0 for number in range(len(group.trajectories))]
    for place, episode in zip(group.rows_of, group.episodes, strict=False):
        for number, row in zip(place, episode.rows, strict=True):
            if row.parent is not None:
                found[number] = place.start + row.parent
    return found


def of_rows(rows: Rows, lengths: Sequence[int], parents: Sequence[int] | None = None) -> list[ExpertChoices | None]:
    """Return the choices of each row, checked; raises PackError.

    ``lengths`` are the tokens of each row, ``parents`` the number of the row that it continues, -1 for none; None: none does.
    """
    if EXPERTS not in rows.table.column_names:
        return [None] * len(lengths)
    shared, stored = rows.values("experts_shared"), rows.values(EXPERTS)
    found: list[ExpertChoices | None] = []
    sizes = zip(*(rows.of_groups(name) for name in ("expert_layers", "num_experts", "expert_top_k")), strict=True)
    for (layers, experts, top_k), (start, end) in zip(sizes, itertools.pairwise(rows.starts), strict=True):
        if not layers:
            if any(stored[start:end]):
                raise PackError("experts of tokens in a group of a model without experts")
            found += [None] * (end - start)
            continue
        shape = RouterShape(num_layers=layers, num_experts=experts, top_k=top_k)
        _check_size(shape, lengths[start:end])
        whole: dict[int, np.ndarray] = {}
        for row in range(start, end):
            parent = -1 if parents is None else parents[row]
            earlier = whole.get(start if parent < 0 else parent)
            whole[row] = _read(shape, stored[row], lengths[row] - 1, shared[row], earlier)
            found.append(ExpertChoices(shape, whole[row]))
    return found


def _check_size(shape: RouterShape, lengths: Sequence[int]) -> None:
    if (size := sum(lengths) * shape.bytes_per_token) > MAX_EXPANDED_BYTES:
        raise PackError(
            f"the experts of {sum(lengths)} tokens in {len(lengths)} rows have {size} bytes, at most {MAX_EXPANDED_BYTES}: {shape}; "
            "lower rollout.group_size or the length of rows"
        )


def _read(shape: RouterShape, stored: bytes, num_tokens: int, shared: int, earlier: np.ndarray | None) -> np.ndarray:
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
    own = np.frombuffer(stored, _stored(shape)).astype(dtype_of(shape), copy=False)
    own = own.reshape(-1, shape.num_layers, shape.top_k)
    return own if earlier is None or not shared else np.concatenate([earlier[:shared], own])


def _stored(shape: RouterShape) -> np.dtype[np.unsignedinteger]:
    return dtype_of(shape).newbyteorder("<")


def _same(one: np.ndarray, other: np.ndarray) -> int:
    shortest = min(len(one), len(other))
    differ = np.flatnonzero((one[:shortest] != other[:shortest]).any(axis=(1, 2)))
    return int(differ[0]) if len(differ) else shortest
