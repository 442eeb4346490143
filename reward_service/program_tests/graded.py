"""The outcome of a program's tests: how many it passed, and why it failed the first that it did not."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sandbox.outcome import Reason


@dataclass(frozen=True, slots=True)
class Graded:
    """The number of passed tests, and the reason and detail of the first failure."""

    passed: int
    total: int
    reason: Reason | None = None
    detail: str = ""
