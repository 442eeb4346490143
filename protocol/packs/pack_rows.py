"""Rows of several groups as they are read from a pack, column by column, and the columns of lists that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.protocol.errors import PackError


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list column whose elements are never null, so that readers need no check."""
    return pa.list_(pa.field("element", kind, nullable=False))


def lists(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), type=kind), type=list_of(kind))


@dataclass(frozen=True, slots=True)
class Rows:
    table: pa.Table
    starts: list[int]  # of each group, and the number of rows
    may_be_null: frozenset[str]  # columns; a null in any other is refused

    def values(self, name: str) -> list[Any]:
        column = self.table.column(name).chunk(0)
        if column.null_count and name not in self.may_be_null:
            raise PackError(f"{name} holds nulls")
        return column.to_pylist()

    def of_groups(self, name: str) -> list[Any]:
        """Return the value that all rows of a group share, for each group; raises PackError where they differ."""
        values, starts = self.values(name), self.starts
        for start, end in itertools.pairwise(starts):
            if values[start:end].count(values[start]) != end - start:
                raise PackError(f"the rows of one group differ in {name}: {str(values[start:end])[:300]}")
        return [values[start] for start in starts[:-1]]

    def lists(self, name: str) -> tuple[np.ndarray, list[int]]:
        """Return the values of all lists of a column together, and where each list begins and the last one ends."""
        column = self.table.column(name).chunk(0)
        offsets = column.offsets.to_numpy()
        first = offsets[0]  # a slice keeps the offsets of the whole column
        values = column.values.slice(first, offsets[-1] - first)
        if column.null_count or values.null_count:
            raise PackError(f"{name} holds nulls")
        return values.to_numpy(zero_copy_only=False), (offsets - first).tolist()
