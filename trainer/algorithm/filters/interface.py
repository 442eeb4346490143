"""What a file that holds a trajectory filter needs: `trajectory_filter`, `Candidate`, `Options`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.trainer.algorithm.parts import Options, OptionsT_co, Part, decorator

__all__ = ["Candidate", "Filter", "FilterFunction", "Kept", "Options", "keep", "trajectory_filter"]
FilterFunction = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Candidate:
    advantage: float
    truncated: bool = False  # cut at rollout.max_new_tokens
    reward: float = 0.0  # as shaped
    num_tokens: int = 0  # sampled
    source: str = ""  # kind of task, the row's data_source
    num_turns: int = 1  # answers of an episode


@dataclass(frozen=True, eq=False, kw_only=True)
class Filter(Part[OptionsT_co]):
    """A trajectory filter: ``fn(candidate, **options)`` returns True for a trajectory to leave out."""

    reason: str  # under which it is counted; of a built-in filter a stored name
    switch: str = ""  # option that turns it on when it is not at its default; empty: algorithm.filters names it
    reads_advantage: bool = True  # False: it works with a critic, where no trajectory has an advantage
    precedence: int = 100  # of several filters that leave a trajectory out, the lowest is counted


trajectory_filter = decorator(Filter)
"""Make a function a trajectory filter of the function's name; the arguments are the fields of `Filter`."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays, by place in what was asked about, and how many were left out for which reason."""

    places: tuple[int, ...]
    skipped: Counter[str] = field(default_factory=Counter)


def keep(candidates: Sequence[Candidate], rules: Sequence[tuple[str, FilterFunction]]) -> Kept:
    """Apply filters, each with its reason, to the trajectories of a batch; the first that applies is counted."""
    places: list[int] = []
    skipped: Counter[str] = Counter()
    for place, candidate in enumerate(candidates):
        reason = next((reason for reason, leaves_out in rules if leaves_out(candidate)), None)
        if reason is None:
            places.append(place)
        else:
            skipped[reason] += 1
    return Kept(tuple(places), skipped)
