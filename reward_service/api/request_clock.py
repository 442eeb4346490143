"""How long a client may take to send a request. Pure.

A client that sends a request slowly, or half of it, keeps a connection and memory for as long as it likes; some
hundred of them keep everybody else out. Every request gets `GRACE_S` seconds, and more while its bytes arrive at
`MIN_BYTES_PER_S` or faster. Clock readings are seconds of one monotonic clock.
"""

from __future__ import annotations

GRACE_S = 10.0  # a request's headers and a small body, over any network
MIN_BYTES_PER_S = 32_000  # 16 MiB may take about nine minutes
MAX_CONNECTIONS = 512  # below the 1,024 files that a process may open by default


class RequestClock:
    """The time since a connection's current request began to arrive; none while a whole request is worked on."""

    def __init__(self, now: float) -> None:
        """Start at the connection's begin: the first request is awaited."""
        self.since: float | None = now
        self._num_bytes = 0

    def arrived(self, now: float, num_bytes: int) -> None:
        """Count bytes; the first ones after a whole request begin the next one."""
        if self.since is None:
            self.since, self._num_bytes = now, 0
        self._num_bytes += num_bytes

    def complete(self) -> None:
        """Stop: the request is there."""
        self.since = None

    def left_s(self, now: float) -> float:
        """Return the seconds until the request is late; 0.0 or less when it is, infinity while none is awaited."""
        if self.since is None:
            return float("inf")
        return self.since + GRACE_S + self._num_bytes / MIN_BYTES_PER_S - now
