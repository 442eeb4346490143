"""How the lines of a terminal are shared among the parts of a frame; pure."""

from __future__ import annotations

from dataclasses import dataclass

_MANY = 10_000
_FRAME_LINES = 4  # border, progress, and one line free so that the terminal does not scroll
_LEAST_CURVE, _MOST_CURVE = 4, 10  # with its caption
_LEAST_SERVICES = 6  # with the head


@dataclass(frozen=True, slots=True)
class Wanted:
    """The lines that each part would like to have."""

    figures: int
    details: int
    services: int  # without the head
    problems: int
    incidents: int
    is_disconnected: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The lines that each part gets; 0 leaves it out."""

    curve: int
    details: int
    services: int  # with the head
    problems: int
    incidents: int
    has_gaps: bool


FULL = Layout(curve=8, details=_MANY, services=_MANY, problems=_MANY, incidents=_MANY, has_gaps=True)


def fit(height: int, wanted: Wanted) -> Layout:
    """Return the layout for a terminal of ``height`` lines: first what each part needs at least, then the rest in order."""
    left = max(height - _FRAME_LINES - wanted.figures - wanted.is_disconnected, 0)

    def take(most: int, had: int = 0) -> int:
        nonlocal left
        more = min(max(most - had, 0), left)
        left -= more
        return had + more

    head = wanted.services + 1 if wanted.services else 0
    services = take(min(head, _LEAST_SERVICES))
    problems = take(min(wanted.problems, 2))
    curve = take(_LEAST_CURVE) if left >= _LEAST_CURVE else 0
    incidents = take(min(wanted.incidents, 1))
    details = take(min(wanted.details, 3))
    incidents = take(min(wanted.incidents, 2), incidents)
    problems = take(min(wanted.problems, 6), problems)
    details = take(wanted.details, details)
    services = take(min(head, max(height // 3, _LEAST_SERVICES)), services)
    incidents = take(wanted.incidents, incidents)
    sections = sum(map(bool, (curve, problems, services, incidents, wanted.is_disconnected))) + 1
    has_gaps = left >= sections
    left -= sections if has_gaps else 0
    if curve:
        curve = take(_MOST_CURVE, curve)
    problems = take(wanted.problems, problems)
    services = take(head, services)
    return Layout(curve, details, services, problems, incidents, has_gaps)
