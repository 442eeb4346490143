"""Rows as one stream of tokens without padding, in which a prefix that rows have in common is there once; pure.

The rows form a forest: a node is a run of tokens, and a row is the path from a root to some token. Tokens are laid out
depth first, `[prompt | answer | answer | prompt | …]`, so the descendants of a node are one range, and the attention of
any tree is causal attention within each node plus one full rectangle (descendants attend to the node) per inner node.
A position is a token's place in its row. No key or value is repeated, and no mask is needed.

`balanced_bins` distributes rows over as few micro-batches as the budget allows, and these over ranks, by what they cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BRANCH_TOKENS = 16  # rows branch at the end of a prompt or a multiple of this after it: a node costs two kernel calls

Tokens = npt.NDArray[np.int32]
Experts = npt.NDArray[np.unsignedinteger]  # [T, layers, k]
_LEAST_GAIN = 0.02  # of the costliest rank, for which a group is split and its prefix is computed twice
_MAX_SPLITS = 32


class Node(NamedTuple):
    """A run of tokens ``[start, end)`` of the stream; its descendants are ``[end, subtree_end)``."""

    start: int
    end: int
    subtree_end: int


class Band(NamedTuple):
    """Queries ``[start, end)`` of a node, and the tokens they attend to: ``before`` of their row, and themselves."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]  # ranges of the stream, in the order of the row
    before: int


@dataclass(slots=True, eq=False)
class Layout:
    """Which tokens of a stream attend to which; passed through a model to the attention function."""

    nodes: tuple[Node, ...]  # in the order of the stream, which they cover
    depths: npt.NDArray[np.int64]  # [T] place of each token in its row
    prepared: dict[Any, Any] = field(default_factory=dict)  # what a backend derives from it, by the backend's key
    windows: list[int | None] = field(
        default_factory=list
    )  # of each call of the attention function since the last pass began

    @property
    def num_tokens(self) -> int:
        return self.nodes[-1].end

    @property
    def longest_row(self) -> int:
        return int(self.depths.max()) + 1

    def trees(self) -> list[list[Node]]:
        forest: list[list[Node]] = []
        end = 0
        for node in self.nodes:
            if node.start == end:
                forest.append([])
                end = node.subtree_end
            forest[-1].append(node)
        return forest

    def mask(self, window: int | None = None) -> npt.NDArray[np.bool_]:
        """Return which token attends to which, [T, T], in its row's last ``window`` tokens; for small trees, and as the definition."""
        mask = np.zeros((self.num_tokens, self.num_tokens), dtype=np.bool_)
        for start, end, subtree_end in self.nodes:
            mask[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
            mask[end:subtree_end, start:end] = True
        return mask if window is None else mask & (self.depths[:, None] - self.depths[None] < window)

    def bands(self, window: int | None, most_queries: int) -> Iterator[Band]:
        """Yield the tokens of each node, at most so many at once, with the keys of their row that they attend to."""
        path: list[Node] = []
        for node in self.nodes:
            while path and path[-1].subtree_end <= node.start:
                path.pop()
            for start in range(node.start, node.end, most_queries):
                depth = int(self.depths[start])
                before = missing = depth if window is None else min(depth, window - 1)
                end = min(start + most_queries, node.end)
                keys = [(start, end)]
                for some in (Node(node.start, start, start), *reversed(path)):
                    if taken := min(missing, some.end - some.start):
                        missing -= taken
                        after = keys.pop() if some.end == keys[-1][0] else None
                        keys.append((some.end - taken, after[1] if after else some.end))
                yield Band(start, end, tuple(reversed(keys)), before)
            path.append(node)

    def rows(self) -> list[npt.NDArray[np.int64]]:
        row_positions, path = [], []
        for node in self.nodes:
            while path and path[-1].subtree_end <= node.start:
                path.pop()
            path.append(node)
            if node.end == node.subtree_end:
                row_positions.append(np.concatenate([np.arange(some.start, some.end) for some in path]))
        return row_positions


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
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
        experts: Of each row, the experts that compute its tokens, which are then part of what rows share; None: not set.
    """
    keys = [row.astype(">u4").tobytes() for row in rows]  # bytes in the order of the tokens
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0] * len(rows)
    for place in range(1, len(order)):
        previous, other = order[place - 1], order[place]
        both = None if experts is None else (experts[previous], experts[other])
        common[place] = _common(rows[previous], rows[other], min(starts[previous], starts[other]), both)
    return Prefixes(order, common)


def _common(row: Tokens, other: Tokens, start: int, experts: tuple[Experts, Experts] | None) -> int:
    shortest = min(len(row), len(other))
    unequal = row[:shortest] != other[:shortest]
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


def num_pairs(length: int, window: int | None = None) -> int:
    """Return how many pairs of tokens attend to each other in a row."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


@dataclass(frozen=True, slots=True)
class PairCost:
    """Cost of one token that attends to one in all layers, relative to a token's other computation."""

    whole: float = 0.0  # in the layers in which tokens attend to all before them
    windowed: float = 0.0  # in those with sliding windows
    window: int | None = None

    def of(self, lengths: Sequence[int], common: Sequence[int]) -> float:
        """Return the cost of rows of which each shares its first ``common`` tokens with the one before."""
        whole, windowed = (
            sum(num_pairs(n, window) - num_pairs(c, window) for n, c in zip(lengths, common, strict=True))
            for window in (None, self.window)
        )
        return self.whole * whole + self.windowed * windowed


NO_PAIR_COST = PairCost()


@dataclass(frozen=True)
class Unit:
    """Rows that are in one micro-batch; each but the first shares a prefix with the one before it."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens that are computed
    common: tuple[int, ...]  # first tokens that each shares with the one before; 0 for the first
    pair_cost: PairCost

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths) - sum(self.common)

    @cached_property
    def cost(self) -> float:
        return self.num_tokens + self.pair_cost.of(self.lengths, self.common)

    def split(self, num: int) -> list[Unit]:
        """Return at most so many pieces with few tokens each; every piece computes its prefix again."""
        low, high = max(self.lengths), self.num_tokens
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self.cut(middle)) <= num else (middle + 1, high)
        return self.cut(low)

    def cut(self, most_tokens: int) -> list[Unit]:
        starts, size = [0], 0
        for place, (length, common) in enumerate(zip(self.lengths, self.common, strict=True)):
            size += length - common
            if size > most_tokens and place:
                starts.append(place)
                size = length
        pieces = []
        for start, end in pairwise([*starts, len(self.rows)]):
            common = (0, *self.common[start + 1 : end])
            pieces.append(Unit(self.rows[start:end], self.lengths[start:end], common, self.pair_cost))
        return pieces


@dataclass(slots=True)
class Bin:
    units: list[Unit] = field(default_factory=list)
    num_tokens: int = 0
    cost: float = 0.0

    def add(self, unit: Unit) -> None:
        self.units.append(unit)
        self.num_tokens += unit.num_tokens
        self.cost += unit.cost

    @property
    def rows(self) -> list[int]:
        return [row for unit in self.units for row in unit.rows]


def units_of(lengths: Sequence[int], prefixes: Prefixes, pair_cost: PairCost) -> list[Unit]:
    """Return the rows in runs that share something; a row's last token predicts nothing and is not computed."""
    runs: list[list[tuple[int, int, int]]] = []
    for row, common in zip(prefixes.order, prefixes.common, strict=True):
        if not common:
            runs.append([])
        runs[-1].append((row, lengths[row] - 1, common))
    return [
        Unit(tuple(r for r, _, _ in run), tuple(n for _, n, _ in run), tuple(c for _, _, c in run), pair_cost)
        for run in runs
    ]


def balanced(units: Sequence[Unit], budget_tokens: int, num_ranks: int) -> list[list[Bin]]:
    """Return the bins of each rank; a unit is split if it is over the budget, or if a rank would wait for it."""
    units = [piece for unit in units for piece in unit.split(len(unit.cut(budget_tokens)))]
    plan = _spread(units, budget_tokens, num_ranks)
    for _ in range(_MAX_SPLITS if num_ranks > 1 else 0):
        slowest = max(plan, key=_load)
        big = max((u for held in slowest for u in held.units if len(u.rows) > 1), key=lambda u: u.cost, default=None)
        if big is None:
            break
        units = [unit for unit in units if unit is not big] + big.split(2)
        other = _spread(units, budget_tokens, num_ranks)
        if len(other[0]) > len(plan[0]) or max(map(_load, other)) > (1 - _LEAST_GAIN) * _load(slowest):
            break
        plan = other
    return plan


def padded_bins(lengths: Sequence[int], budget_tokens: int, num_ranks: int, pair_cost: PairCost) -> list[list[Bin]]:
    """Return the bins of each rank, with rows of similar length together and each counted as its bin's longest."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    pieces: list[list[int]] = [[]]
    for row in order:
        if pieces[-1] and (len(pieces[-1]) + 1) * lengths[pieces[-1][0]] > budget_tokens:
            pieces.append([])
        pieces[-1].append(row)
    while len(pieces) % num_ranks:
        piece = pieces.pop(max(range(len(pieces)), key=lambda n: len(pieces[n])))
        pieces += [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    bins = []
    for piece in pieces:
        bins.append(Bin())
        for row in piece:
            bins[-1].add(Unit((row,), (lengths[row] - 1,), (0,), pair_cost))
    return _share(bins, num_ranks)


def _spread(units: Sequence[Unit], budget_tokens: int, num_ranks: int) -> list[list[Bin]]:
    ordered = sorted(units, key=lambda unit: (-unit.cost, unit.rows))
    least = -(-sum(unit.num_tokens for unit in units) // budget_tokens)
    for num in count(max(1, -(-least // num_ranks)) * num_ranks, num_ranks):
        bins = _filled(ordered, num, budget_tokens, tight=False) or _filled(ordered, num, budget_tokens, tight=True)
        if bins is not None:
            return _share(bins, num_ranks)
    raise AssertionError("every unit alone is within the budget")


def _filled(ordered: Sequence[Unit], num: int, budget_tokens: int, *, tight: bool) -> list[Bin] | None:
    """Put each unit into the cheapest bin that can hold it, or, for a ``tight`` fit, into the most expensive one."""
    bins = [Bin() for _ in range(num)]
    for unit in ordered:
        fitting = [held for held in bins if held.num_tokens + unit.num_tokens <= budget_tokens]
        if not fitting:
            return None
        (max if tight else min)(fitting, key=lambda held: held.cost).add(unit)
    return bins


def _load(bins: Sequence[Bin]) -> float:
    return sum(held.cost for held in bins)


def _share(bins: list[Bin], num_ranks: int) -> list[list[Bin]]:
    per_rank = len(bins) // num_ranks
    plan: list[list[Bin]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for held in sorted(bins, key=lambda held: -held.cost):
        load, rank = heapq.heappop(loads)
        plan[rank].append(held)
        if len(plan[rank]) < per_rank:
            heapq.heappush(loads, (load + held.cost, rank))
    return plan
