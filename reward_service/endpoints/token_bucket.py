"""A token bucket: a rate of calls per second, with a burst of at most one second. Pure."""

from __future__ import annotations


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
