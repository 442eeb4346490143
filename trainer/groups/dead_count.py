"""Whether a service upstream fails for every group, as far as dead letters can tell; pure.

Every service may write dead letters, and a letter may name a group that is well and on its way. So letters alone end no
run. They close groups until the groups arrive after all, and they stop the issue of others once more than ``most`` were
closed in excess of those that arrived. Then the queues run empty unless groups are on their way, and only if all queues
are empty the letters were true.
"""

from __future__ import annotations


class DeadCount:
    """Counts dead-lettered groups against those that arrive. Not thread-safe: the owner locks."""

    def __init__(self, most: int) -> None:
        """``most`` is the number of consecutive dead-lettered groups, without one that arrives, that ends a run."""
        self._most = most
        self._excess = 0  # dead-lettered groups minus arrived ones, since it was last 0
        self.in_a_row = 0  # dead-lettered groups since the last one that arrived
        self.last_reason = ""

    @property
    def stops_issue(self) -> bool:
        """Whether no further group may be issued until groups arrive or all queues are empty."""
        return self._excess > self._most

    def add(self, num_groups: int, reason: str) -> None:
        """Count outstanding groups that a letter closed."""
        self._excess += num_groups
        self.in_a_row += num_groups
        self.last_reason = reason

    def arrive(self, num_groups: int) -> None:
        """Count groups that arrived scored and readable."""
        self._excess = max(0, self._excess - num_groups)
        self.in_a_row = 0

    def settle(self) -> bool:
        """Return True if the run must end, now that all queues are empty; otherwise issue may go on."""
        if self.in_a_row >= self._most:
            return True
        self._excess = 0
        return False
