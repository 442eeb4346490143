"""When a group that got no reward is delivered again, and when it is dead-lettered instead; pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.reward_service.errors import NotCalled, RewardError

_MAX_DELAY_S = 60.0
_NOT_CALLED_S = 0.5
_NOT_CALLED_MAX_S = 8.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of redelivery.

    Attributes:
        attempts: Attempts at scoring a group before it is dead-lettered.
        delay_s: Wait after the first failed attempt.
        not_called_limit_s: How long a group may wait for an endpoint that is not called before it is dead-lettered.
    """

    attempts: int
    delay_s: float
    not_called_limit_s: float

    def delay_after(self, attempt: int) -> float:
        """Return the wait in seconds after a failed attempt: doubled each time, at most a minute (or ``delay_s``)."""
        return min(self.delay_s * 2.0 ** min(attempt - 1, 30), max(_MAX_DELAY_S, self.delay_s))

    def delay_not_called(self, err: NotCalled, num_before: int) -> float:
        """Return the wait in seconds when no endpoint was called, after ``num_before`` deliveries of that kind.

        It is what the error says, doubled each time, with jitter of a quarter so that groups do not come in step.
        """
        first_s, most_s = max(err.retry_in_s, _NOT_CALLED_S), max(err.retry_in_s, _NOT_CALLED_MAX_S)
        return min(first_s * 2.0 ** min(num_before, 30), most_s) * random.uniform(0.75, 1.25)  # noqa: S311 no secret


def is_permanent(err: Exception) -> bool:
    """Return True for an error that another attempt cannot remove."""
    return err.permanent if isinstance(err, RewardError) else True
