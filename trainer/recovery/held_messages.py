"""The bound of scored messages: the trainer holds them until a checkpoint, and their stream takes no more than a number of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import GroupScored
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.stream_admin import StreamState

_OVERHEAD_BYTES = 256  # of one stored message: subject, headers, length and checksum
_CURE = "raise retention.scored_messages and run `penstock bootstrap` again"


@dataclass(frozen=True, slots=True)
class HeldBound:
    """What the stream ``scored`` takes, and what a step may need of it.

    Attributes:
        max_messages: Messages in the stream, held ones included; 0: any number.
        max_bytes: Their bytes; 0: any number.
        step_messages: Messages of one step where each holds one group, the most there may be.
        least_messages: Messages of one step where each holds as many groups as were sent together.
    """

    max_messages: int
    max_bytes: int
    step_messages: int
    least_messages: int

    @classmethod
    def of_stream(cls, state: StreamState, *, groups_per_step: int, groups_per_message: int) -> HeldBound:
        least = -(-groups_per_step // groups_per_message) if groups_per_message else 1  # 0: chosen by size
        return cls(max(0, state.max_messages), max(0, state.max_bytes), groups_per_step, least)

    def check(self) -> str:
        """Return a warning, empty if there is none; raises ConfigError if no step can be made."""
        if not self.max_messages or 2 * self.step_messages <= self.max_messages:
            return ""
        text = (
            f"a step of rollout.groups_per_step = {self.step_messages} groups needs {self.least_messages} to {self.step_messages} "
            f"messages, and the stream of scored groups takes {self.max_messages}, which are held until a checkpoint; {_CURE}"
        )
        if self.least_messages > self.max_messages:
            raise ConfigError(f"no step can be made: {text}, or lower rollout.groups_per_step")
        return f"there is a checkpoint after nearly every step, or none can be made: {text}"

    def steps_between(self) -> int | None:
        """Return after how many steps at the latest a checkpoint is due by this bound; None without one."""
        return max(1, -(-self.max_messages // (2 * self.step_messages))) if self.max_messages else None

    def is_due(self, settled: Collection[int], num_unsettled: int) -> bool:
        """Return True if a checkpoint must make room.

        ``settled`` are the bytes of each message that a checkpoint would acknowledge, ``num_unsettled`` counts the others that are held.
        One is due when half of the bound is settled, or the messages that the next step still needs have no room.
        """
        if not settled:
            return False
        missing = max(0, self.step_messages - num_unsettled)
        is_full = 2 * len(settled) >= self.max_messages or len(settled) + num_unsettled + missing > self.max_messages
        # Messages of the next step, held or missing, are taken to be as large as the largest that is settled.
        needed_bytes = max(self.least_messages, num_unsettled) * max(settled)
        is_full_bytes = 2 * sum(settled) >= self.max_bytes or sum(settled) + needed_bytes > self.max_bytes
        return (self.max_messages > 0 and is_full) or (self.max_bytes > 0 and is_full_bytes)

    def is_crowded(self, num_held: int) -> bool:
        """Return True if held messages take half of the stream, so that those of an evaluation may not get in."""
        return 0 < self.max_messages <= 2 * num_held


def sizes(deliveries: Iterable[Delivery[GroupScored]]) -> list[int]:
    """Return the bytes that each message takes in its stream."""
    return [len(delivery.msg.data) + _OVERHEAD_BYTES for delivery in deliveries]
