"""How long a full batch waits for groups that it would overtake for good; pure."""

from __future__ import annotations


class Patience:
    """Whole at first; half as long after every wait in vain, whole again when nobody was overtaken.

    Where a group is late now and then, a batch waits for it. Where one is late in every step, the waits halve to nothing:
    all of them together cost less than two whole ones, until a batch leaves nobody behind again.
    """

    def __init__(self) -> None:
        """Begin with all of it."""
        self._share = 1.0

    def of(self, whole_s: float) -> float:
        """Return how much of a whole wait is left, in seconds."""
        return whole_s * self._share

    def took(self, *, overtook: bool) -> None:
        """Take note of a batch, and whether it was taken although it overtook somebody."""
        self._share = self._share / 2 if overtook else 1.0
