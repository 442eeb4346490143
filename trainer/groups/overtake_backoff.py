"""How long a full batch waits for groups that would be too old for the next one; pure."""

from __future__ import annotations


class OvertakeBackoff:
    """Halves the wait after every batch that overtook groups, and restores it after one that overtook none.

    Where a group is late now and then, a batch waits for it. Where one is late in every step, the waits halve towards
    zero: together they cost less than two full ones, until a batch overtakes none again.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._full_since: float | None = None  # when the batch that is to be taken became full

    def rest_s(self, full_s: float, *, overtakes: bool, now: float) -> float:
        """Return how much longer a full batch waits, in seconds; 0 or less: it is to be taken.

        Args:
            full_s: The full wait, from the moment the batch became full.
            overtakes: Whether groups under way would be too old for the next batch; False while there is no full batch.
            now: Seconds of any monotonic clock.
        """
        if not overtakes or full_s <= 0.0:
            return 0.0
        if self._full_since is None:
            self._full_since = now
        return self._full_since + self.scale(full_s) - now

    def scale(self, full_s: float) -> float:
        """Return how much of a full wait to use now, in seconds."""
        return full_s * self._share

    def record(self, *, overtook: bool) -> None:
        self._share = self._share / 2 if overtook else 1.0
        self._full_since = None
