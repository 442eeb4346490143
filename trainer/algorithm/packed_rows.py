"""Rows as one stream of tokens without padding, in which a prefix that rows have in common is there once; pure.

The rows form a forest: a node is a run of tokens, and a row is the path from a root to some token. Tokens are laid out
depth first, `[prompt | answer | answer | prompt | …]`, so the descendants of a node are one range, and the attention of
any tree is causal attention within each node plus one full rectangle (descendants attend to the node) per inner node.
A position is a token's place in its row. No key or value is repeated, and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BRANCH_TOKENS = 16  # rows branch at the end of a prompt or a multiple of this after it: a node costs two kernel calls

Tokens = npt.NDArray[np.int32]
Experts = npt.NDArray[np.unsignedinteger]  # [T, layers, k]


class Node(NamedTuple):
    """A run of tokens ``[start, end)`` of the stream; its descendants are ``[end, subtree_end)``."""

    start: int
    end: int
    subtree_end: int


@dataclass(slots=True, eq=False)
class Layout:
    """Which tokens of a stream attend to which; passed through a model to the attention function."""

    nodes: tuple[Node, ...]  # in the order of the stream, which they cover
    depths: npt.NDArray[np.int64]  # [T] place of each token in its row
    prepared: dict[Any, Any] = field(default_factory=dict)  # what a backend derives from it, by its own key
    num_calls: int = 0  # of the attention function in the last forward pass

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream."""
        return self.nodes[-1].end

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return int(self.depths.max()) + 1

    def trees(self) -> list[list[Node]]:
        """Return the nodes of each tree."""
        found: list[list[Node]] = []
        end = 0
        for node in self.nodes:
            if node.start == end:
                found.append([])
                end = node.subtree_end
            found[-1].append(node)
        return found

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return which token attends to which, [T, T]; for small trees, and as the definition in tests."""
        mask = np.zeros((self.num_tokens, self.num_tokens), dtype=np.bool_)
        for start, end, subtree_end in self.nodes:
            mask[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
            mask[end:subtree_end, start:end] = True
        return mask

    def rows(self) -> list[npt.NDArray[np.int64]]:
        """Return the path to each leaf, as positions in the stream; every token is on at least one."""
        found, path = [], []
        for node in self.nodes:
            while path and path[-1].subtree_end <= node.start:
                path.pop()
            path.append(node)
            if node.end == node.subtree_end:
                found.append(np.concatenate([np.arange(some.start, some.end) for some in path]))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows in one stream."""

    token_ids: npt.NDArray[np.int64]  # [T]
    layout: Layout
    positions: list[npt.NDArray[np.int64]]  # of each row: where its tokens are in the stream


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The order in which rows with a common prefix are adjacent, and how long the prefixes are."""

    order: list[int]  # row numbers
    common: list[int]  # first tokens that the row in this place shares with the one before it


def common_prefixes(
    rows: Sequence[Tokens], starts: Sequence[int], experts: Sequence[Experts] | None = None
) -> Prefixes:
    """Find the prefixes that rows share.

    Args:
        rows: Tokens that are computed, of each row.
        starts: Of each row, its first sampled token. Rows share nothing before they share a whole prompt: a chat
            template's first words alone are not worth a node.
        experts: Of each row, the experts that compute its tokens, which are then part of what rows share; None: not given.
    """
    keys = [row.astype(">u4").tobytes() for row in rows]  # bytes in the order of the tokens
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0] * len(rows)
    for place in range(1, len(order)):
        one, other = order[place - 1], order[place]
        both = None if experts is None else (experts[one], experts[other])
        common[place] = _common(rows[one], rows[other], min(starts[one], starts[other]), both)
    return Prefixes(order, common)


def _common(one: Tokens, other: Tokens, start: int, experts: tuple[Experts, Experts] | None) -> int:
    shortest = min(len(one), len(other))
    unequal = one[:shortest] != other[:shortest]
    if experts is not None:
        unequal |= (experts[0][:shortest] != experts[1][:shortest]).any(axis=(1, 2))
    differ = np.flatnonzero(unequal)
    if len(differ) == 0:
        return shortest  # one row continues the other, which needs no branch
    same = int(differ[0])
    return 0 if same < start else start + (same - start) // BRANCH_TOKENS * BRANCH_TOKENS


def pack(rows: Sequence[Tokens], starts: Sequence[int], experts: Sequence[Experts] | None = None) -> PackedRows:
    """Lay out rows as one stream; arguments as in `common_prefixes`. Without a token, the stream is one token 0."""
    prefixes = common_prefixes(rows, starts, experts)
    empty = np.empty(0, dtype=np.int64)
    positions, parts = [empty] * len(rows), []
    nodes: list[_Run] = []
    path: list[_Run] = []
    before, size = empty, 0
    for number, common in zip(prefixes.order, prefixes.common, strict=True):
        new = len(rows[number]) - common
        _branch(nodes, path, common, size, size + new)
        before = positions[number] = np.concatenate([before[:common], np.arange(size, size + new)])
        parts.append(rows[number][common:])
        size += new
    if size == 0:
        return PackedRows(np.zeros(1, np.int64), Layout((Node(0, 1, 1),), np.zeros(1, np.int64)), positions)
    depths = np.empty(size, dtype=np.int64)
    for row in positions:
        depths[row] = np.arange(len(row))
    return PackedRows(np.concatenate(parts).astype(np.int64), Layout(_nodes(nodes, size), depths), positions)


@dataclass(slots=True)
class _Run:
    """A node under construction."""

    start: int
    end: int
    depth: int  # of its first token

    @property
    def depth_end(self) -> int:
        return self.depth + self.end - self.start


def _branch(nodes: list[_Run], path: list[_Run], common: int, start: int, end: int) -> None:
    """Add the tokens ``[start, end)`` below the first ``common`` tokens of ``path``, which becomes the path to them."""
    while path and path[-1].depth >= common:
        path.pop()
    if path and common < path[-1].depth_end:  # the rows part inside of a node
        upper = path[-1]
        middle = upper.start + common - upper.depth
        nodes.append(_Run(middle, upper.end, common))
        upper.end = middle
    if start == end:
        return
    if path and path[-1].end == start:  # this row continues the one before
        path[-1].end = end
        return
    path.append(_Run(start, end, common))
    nodes.append(path[-1])


def _nodes(runs: list[_Run], size: int) -> tuple[Node, ...]:
    runs = sorted(runs, key=lambda run: run.start)
    ends, open_runs = [size] * len(runs), []
    for number, run in enumerate(runs):
        while open_runs and run.depth < runs[open_runs[-1]].depth_end:
            ends[open_runs.pop()] = run.start
        open_runs.append(number)
    return tuple(Node(run.start, run.end, end) for run, end in zip(runs, ends, strict=True))
