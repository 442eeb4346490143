"""Columns of a pack whose groups say which experts computed their tokens, beside those of every pack; pure.

A row has the choices of all its tokens but the last as bytes: `ExpertChoices.ids`, 8 or 16 bits each (little endian). Those of its first
``experts_shared`` tokens, usually the prompt's, are the same as in its group's first row and stored there only. The rows of a group without
any, in the same pack, have zeros and no bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.protocol.errors import PackError
from penstock.protocol.expert_choices import ExpertChoices, dtype_of
from penstock.protocol.facts import RouterShape
from penstock.protocol.packs.pack_rows import Rows
from penstock.protocol.trajectory import Group

EXPERTS = "experts"
FIELDS = (
    pa.field("expert_layers", pa.int32(), nullable=False),  # 0: the group does not say
    pa.field("expert_top_k", pa.int32(), nullable=False),
    pa.field("num_experts", pa.int32(), nullable=False),
    pa.field("experts_shared", pa.int32(), nullable=False),
    pa.field(EXPERTS, pa.binary(), nullable=False),
)


def columns(groups: Sequence[Group]) -> list[Any]:
    """Return the columns of `FIELDS` for the rows of groups."""
    shapes, shared, stored = [], [], []
    for group in groups:
        first = group.trajectories[0].experts
        for number, row in enumerate(group.trajectories):
            same = 0
            if row.experts is None or first is None:
                stored.append(b"")
            else:
                same = _same(first.ids, row.experts.ids) if number else 0
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


def of_rows(rows: Rows, lengths: Sequence[int]) -> list[ExpertChoices | None]:
    """Return the choices of each row, checked; ``lengths`` are the tokens of each. Raises PackError."""
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
        first: np.ndarray | None = None
        for row in range(start, end):
            ids = _read(shape, stored[row], lengths[row] - 1, shared[row], first)
            first = ids if first is None else first
            found.append(ExpertChoices(shape, ids))
    return found


def _read(shape: RouterShape, stored: bytes, num_tokens: int, shared: int, first: np.ndarray | None) -> np.ndarray:
    """Return the choices of a row, [num_tokens, layers, k]."""
    most = min(num_tokens, 0 if first is None else len(first))
    if not 0 <= shared <= most:
        raise PackError(f"a row shares the experts of {shared} tokens with its group's first row, expected 0 to {most}")
    expected = (num_tokens - shared) * shape.bytes_per_token
    if len(stored) != expected:
        raise PackError(
            f"experts of {num_tokens - shared} tokens in {len(stored)} bytes, expected {expected}: {shape}, "
            f"{shape.bytes_per_token} bytes for each token"
        )
    own = np.frombuffer(stored, _stored(shape)).astype(dtype_of(shape), copy=False)
    own = own.reshape(-1, shape.num_layers, shape.top_k)
    return own if first is None or not shared else np.concatenate([first[:shared], own])


def _stored(shape: RouterShape) -> np.dtype[np.unsignedinteger]:
    return dtype_of(shape).newbyteorder("<")


def _same(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many first tokens have the same choices."""
    shortest = min(len(one), len(other))
    differ = np.flatnonzero((one[:shortest] != other[:shortest]).any(axis=(1, 2)))
    return int(differ[0]) if len(differ) else shortest
