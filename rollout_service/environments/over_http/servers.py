"""Which of several servers of one environment gets the next episode. Pure: the caller gives the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_REST_S, _LONGEST_REST_S = 0.5, 30.0


@dataclass(slots=True)
class Server:
    """One server as this worker sees it."""

    url: str
    running: int = 0  # episodes of this worker
    failures: int = 0  # in a row
    rests_until: float = 0.0  # no new episode before this time

    def failed(self, now: float) -> None:
        """Give it no new episode for a while, twice as long after each failure in a row; those of calls in flight are one."""
        if now < self.rests_until:
            return
        self.failures += 1
        self.rests_until = now + min(_FIRST_REST_S * 2.0 ** (self.failures - 1), _LONGEST_REST_S)

    def is_full(self, now: float, retry_after_s: float) -> None:
        """Give it no new episode before it wants one; a server that is full has not failed."""
        self.rests_until = now + min(max(retry_after_s, 0.05), _LONGEST_REST_S)

    def works(self) -> None:
        """Note that it answered."""
        self.failures, self.rests_until = 0, 0.0


class Servers:
    """The servers of one environment."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Start with all of them idle."""
        self._servers = tuple(Server(url) for url in urls)

    def choose(self, now: float) -> Server | None:
        """Return the one with the fewest episodes of this worker; None while all rest."""
        ready = [one for one in self._servers if one.rests_until <= now]
        return min(ready, key=lambda one: one.running) if ready else None

    def ready_in_s(self, now: float) -> float:
        """Return the seconds until one of them may get an episode."""
        return max(0.0, min(one.rests_until for one in self._servers) - now)
