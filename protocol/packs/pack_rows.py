"""Rows of several groups as they are written to a pack and read from it, column by column; pure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.protocol.episode import Episode, EpisodeRow
from penstock.protocol.errors import PackError
from penstock.protocol.trajectory import Group, Trajectory

NONE = -1  # in columns of numbers: no episode, no parent


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list column whose elements are never null, so that readers need no check."""
    return pa.list_(pa.field("element", kind, nullable=False))


@dataclass(frozen=True, eq=False)
class StoredRow:
    """One row of a group as it is written."""

    group: Group
    index: int  # among the rows of the group
    row: Trajectory
    episode_number: int = NONE  # among the episodes of the group
    episode: Episode | None = None
    path: EpisodeRow | None = None  # the row as one of the episode
    start: int = 0  # index of the episode's first row

    @property
    def shared(self) -> int:
        """How many of its first tokens are stored with another row."""
        return self.path.prefix_len if self.path is not None else 0

    @functools.cached_property
    def experts_shared(self) -> int:
        """How many of its first tokens have the experts of an earlier row, and are stored there only."""
        parent = self.path.parent if self.path is not None else None
        earlier = self.group.trajectories[0 if parent is None else self.start + parent].experts
        if not self.index or self.row.experts is None or earlier is None:
            return 0
        mine, theirs = self.row.experts.ids, earlier.ids
        shortest = min(len(mine), len(theirs))
        differ = np.flatnonzero((mine[:shortest] != theirs[:shortest]).any(axis=(1, 2)))
        return int(differ[0]) if len(differ) else shortest


class Column(NamedTuple):
    """One column of a pack, and its value in a row."""

    field: pa.Field
    value_of: Callable[[StoredRow], Any]

    def array(self, rows: Sequence[StoredRow]) -> pa.Array:
        values, kind = [self.value_of(row) for row in rows], self.field.type
        if not pa.types.is_list(kind):
            return pa.array(values, kind)
        offsets = np.zeros(len(values) + 1, dtype=np.int32)
        np.cumsum([len(elements) for elements in values], out=offsets[1:])
        elements = pa.array(np.concatenate(values), type=kind.value_type)
        return pa.ListArray.from_arrays(pa.array(offsets), elements, type=kind)


def column(name: str, kind: pa.DataType, value_of: Callable[[StoredRow], Any], *, nullable: bool = False) -> Column:
    return Column(pa.field(name, kind, nullable=nullable), value_of)


def rows_of(groups: Sequence[Group]) -> Iterator[StoredRow]:
    """Yield the rows of all groups, in order."""
    for group in groups:
        if not group.episodes:
            yield from (StoredRow(group, index, row) for index, row in enumerate(group.trajectories))
        for number, (episode, places) in enumerate(zip(group.episodes, group.rows_of, strict=False)):
            for index, path in zip(places, episode.rows, strict=True):
                yield StoredRow(group, index, path.trajectory, number, episode, path, places.start)


@dataclass(frozen=True, slots=True)
class Rows:
    table: pa.Table
    starts: list[int]  # of each group, and the number of rows
    may_be_null: frozenset[str]  # columns; a null in any other is refused

    def has(self, name: str) -> bool:
        return name in self.table.column_names

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

    def each_group(self, *names: str) -> list[dict[str, Any]]:
        """Return the values that all rows of a group share, by column, for each group; raises as `of_groups`."""
        columns = [self.of_groups(name) for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def lists(self, name: str) -> tuple[np.ndarray, list[int]]:
        """Return the values of all lists of a column together, and where each list begins and the last one ends."""
        column = self.table.column(name).chunk(0)
        offsets = column.offsets.to_numpy()
        first = offsets[0]  # a slice keeps the offsets of the whole column
        values = column.values.slice(first, offsets[-1] - first)
        if column.null_count or values.null_count:
            raise PackError(f"{name} holds nulls")
        return values.to_numpy(zero_copy_only=False), (offsets - first).tolist()
