"""Which groups of a message are settled, so that a redelivery scores only the others.

Kept in this process only, and bounded: after a restart, or on another replica, all groups of the
message are scored again, and the trainer drops the doubles by their ids.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_MESSAGES = 10_000  # a message is remembered only while groups of it wait; more is memory for nothing


class Progress:
    """The ids of settled groups by the sequence number of their message."""

    def __init__(self, max_messages: int = MAX_MESSAGES) -> None:
        """Remember at most ``max_messages``; the one untouched for longest is forgotten first."""
        self._settled: OrderedDict[int, frozenset[str]] = OrderedDict()
        self._max_messages = max_messages

    def settled(self, sequence: int) -> frozenset[str]:
        """Return the ids of a message's groups that need nothing more."""
        return self._settled.get(sequence, frozenset())

    def add(self, sequence: int, group_ids: frozenset[str]) -> None:
        """Note that these groups of the message are settled."""
        self._settled[sequence] = self.settled(sequence) | group_ids
        self._settled.move_to_end(sequence)
        while len(self._settled) > self._max_messages:
            self._settled.popitem(last=False)

    def forget(self, sequence: int) -> None:
        """The message was acknowledged and does not come again."""
        self._settled.pop(sequence, None)
