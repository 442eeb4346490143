"""What this process remembers of a message between two deliveries: settled groups, and excused deliveries.

Bounded, and lost with the process: after a restart, or on another replica, all groups of the message
are scored again, and the trainer drops the doubles by their ids.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_MESSAGES = 10_000  # a message is remembered only while groups of it wait; more is memory for nothing


@dataclass(frozen=True, slots=True)
class _Memory:
    settled: frozenset[str] = frozenset()
    num_excused: int = 0


class Progress:
    """Memories of messages by their sequence number in the stream."""

    def __init__(self, max_messages: int = MAX_MESSAGES) -> None:
        """Remember at most ``max_messages``; the one untouched for longest is forgotten first."""
        self._messages: OrderedDict[int, _Memory] = OrderedDict()
        self._max_messages = max_messages

    def settled(self, sequence: int) -> frozenset[str]:
        """Return the ids of a message's groups that need nothing more."""
        return self._messages.get(sequence, _Memory()).settled

    def attempt(self, sequence: int, num_delivered: int) -> int:
        """Return which attempt at scoring a delivery is, from 1: deliveries without the excused ones."""
        return max(1, num_delivered - self._messages.get(sequence, _Memory()).num_excused)

    def add(self, sequence: int, group_ids: frozenset[str]) -> None:
        """Note that these groups of the message are settled."""
        memory = self._messages.get(sequence, _Memory())
        self._keep(sequence, _Memory(memory.settled | group_ids, memory.num_excused))

    def excuse(self, sequence: int) -> None:
        """Note that a delivery came to nothing because NATS or S3 was away; it is no attempt at scoring."""
        memory = self._messages.get(sequence, _Memory())
        self._keep(sequence, _Memory(memory.settled, memory.num_excused + 1))

    def forget(self, sequence: int) -> None:
        """The message was acknowledged and does not come again."""
        self._messages.pop(sequence, None)

    def _keep(self, sequence: int, memory: _Memory) -> None:
        self._messages[sequence] = memory
        self._messages.move_to_end(sequence)
        while len(self._messages) > self._max_messages:
            self._messages.popitem(last=False)
