"""Distributes rows over as few micro-batches as the budget allows, and these over ranks, by what they cost; pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise

from penstock.trainer.algorithm.packed_rows import Prefixes

_LEAST_GAIN = 0.02  # of the costliest rank, for which a group is split and its prefix is computed twice
_MAX_SPLITS = 32


@dataclass(frozen=True)
class Unit:
    """Rows that are in one micro-batch; each but the first shares a prefix with the one before it."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens that are computed
    common: tuple[int, ...]  # first tokens that each shares with the one before; 0 for the first
    pair_cost: float

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the rows, each shared one counted once."""
        return sum(self.lengths) - sum(self.common)

    @cached_property
    def cost(self) -> float:
        """Computation, in units of a token without its attention."""
        pairs = sum(n * (n + 1) - c * (c + 1) for n, c in zip(self.lengths, self.common, strict=True)) / 2
        return self.num_tokens + self.pair_cost * pairs

    def split(self, num: int) -> list[Unit]:
        """Return at most so many pieces with few tokens each; every piece computes its prefix again."""
        low, high = max(self.lengths), self.num_tokens
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self.cut(middle)) <= num else (middle + 1, high)
        return self.cut(low)

    def cut(self, most_tokens: int) -> list[Unit]:
        """Return pieces of at most so many tokens, as few as possible in this order of the rows."""
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
    """The units of one micro-batch."""

    units: list[Unit] = field(default_factory=list)
    num_tokens: int = 0
    cost: float = 0.0

    def add(self, unit: Unit) -> None:
        """Add a unit."""
        self.units.append(unit)
        self.num_tokens += unit.num_tokens
        self.cost += unit.cost

    @property
    def rows(self) -> list[int]:
        """Row numbers."""
        return [row for unit in self.units for row in unit.rows]


def units_of(lengths: Sequence[int], prefixes: Prefixes, pair_cost: float) -> list[Unit]:
    """Return the rows in runs that share something; a row's last token predicts nothing and is not computed."""
    found: list[list[tuple[int, int, int]]] = []
    for row, common in zip(prefixes.order, prefixes.common, strict=True):
        if not common:
            found.append([])
        found[-1].append((row, lengths[row] - 1, common))
    return [
        Unit(tuple(r for r, _, _ in run), tuple(n for _, n, _ in run), tuple(c for _, _, c in run), pair_cost)
        for run in found
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


def padded_bins(lengths: Sequence[int], budget_tokens: int, num_ranks: int, pair_cost: float) -> list[list[Bin]]:
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
    """Give each rank equally many bins, the costliest first to the rank with the least cost."""
    per_rank = len(bins) // num_ranks
    plan: list[list[Bin]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for held in sorted(bins, key=lambda held: -held.cost):
        load, rank = heapq.heappop(loads)
        plan[rank].append(held)
        if len(plan[rank]) < per_rank:
            heapq.heappush(loads, (load + held.cost, rank))
    return plan
