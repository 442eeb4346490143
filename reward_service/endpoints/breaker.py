"""A circuit breaker: an endpoint that mostly fails is not called for a while, then tried with one call. Pure.

closed ──(of the last calls, at least `MIN_CALLS`, half or more failed)──▶ open
open ──(its pause is over)──▶ half-open: one call at a time goes through
half-open ──(it succeeds)──▶ closed            half-open ──(it fails)──▶ open, for twice as long

Clock readings are seconds of one monotonic clock.

`TokenBucket` is a rate of calls per second, with a burst of at most one second.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

WINDOW = 20  # most recent calls that are looked at
MIN_CALLS = 5  # fewer do not open the breaker
FAILED_SHARE = 0.5
FIRST_PAUSE_S = 1.0  # a restart of a small server
LONGEST_PAUSE_S = 30.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._open_until: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._probing = False
        self.num_opened = 0

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def admit(self, now: float) -> bool:
        """Return True if a call may be made now; half-open, that is the one probe."""
        state = self.state(now)
        if state is BreakerState.CLOSED:
            return True
        if state is BreakerState.OPEN or self._probing:
            return False
        self._probing = True
        return True

    def withdraw(self) -> None:
        self._probing = False

    def retry_in_s(self, now: float) -> float:
        if self._open_until is None:
            return 0.0
        return max(self._open_until - now, FIRST_PAUSE_S / 2)

    def record(self, now: float, *, failed: bool) -> bool:
        """Record how a call ended; returns True when this opened the breaker."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return False  # a call that began before it opened
        if state is BreakerState.HALF_OPEN:
            self._probing = False
            if failed:
                self._open(now, min(2 * self._pause_s, LONGEST_PAUSE_S))
                return True
            self.close()
            return False
        self._recent.append(failed)
        if len(self._recent) >= MIN_CALLS and sum(self._recent) >= FAILED_SHARE * len(self._recent):
            self._open(now, FIRST_PAUSE_S)
            return True
        return False

    def close(self) -> None:
        self._open_until, self._probing, self._pause_s = None, False, FIRST_PAUSE_S
        self._recent.clear()

    def trip(self, now: float) -> None:
        self._open(now, min(2 * self._pause_s, LONGEST_PAUSE_S) if self._open_until is not None else FIRST_PAUSE_S)

    def _open(self, now: float, pause_s: float) -> None:
        self._pause_s, self._open_until, self._probing = pause_s, now + pause_s, False
        self._recent.clear()
        self.num_opened += 1


class TokenBucket:
    """Tokens that are refilled at ``rate_per_s``; None means no limit. Clock readings are monotonic seconds."""

    def __init__(self, rate_per_s: float | None, now: float) -> None:
        """Start full: a second's worth of tokens, at least one."""
        self._rate = rate_per_s
        self._size = max(1.0, rate_per_s or 0.0)
        self._tokens = self._size
        self._at = now

    def take(self, now: float) -> float:
        """Take a token and return 0.0, or take none and return the seconds until there is one."""
        if self._rate is None:
            return 0.0
        self._tokens = min(self._size, self._tokens + max(now - self._at, 0.0) * self._rate)
        self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate
