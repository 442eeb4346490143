"""Which of the completions of a group are kept when more were started than are needed; pure.

`CompletionSampler` asks it about an engine's requests, `penstock plan` about simulated ones.

    started ──▶ ``enough`` have ended ──(wait x the time that took)──▶ closed: what has ended is kept, the rest is aborted

Short completions end first, so what is kept is shorter than what was started, the more so the smaller ``wait`` is.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Redundancy:
    """How many completions of a prompt are started, and when they are enough."""

    enough: int  # a group is complete with so many
    extra: int = 0  # started besides
    # How much longer the rest may take, as a share of the time in which ``enough`` ended; 0: none of it is kept.
    wait: float = 0.0

    @property
    def started(self) -> int:
        """Number of completions that are started."""
        return self.enough + self.extra


@dataclass(slots=True)
class RedundantGroup:
    """The completions of one group, by their numbers from 0; times are seconds of any one clock."""

    redundancy: Redundancy
    started_at: float
    ended: list[int] = field(default_factory=list)  # in the order of their ends
    enough_at: float | None = None  # when ``enough`` had ended

    def end(self, number: int, now: float) -> None:
        """Record that a completion has ended; completions that end together are given by number."""
        self.ended.append(number)
        if len(self.ended) == self.redundancy.enough:
            self.enough_at = now

    @property
    def closes_at(self) -> float | None:
        """When the rest is aborted; None while fewer than ``enough`` have ended."""
        if self.enough_at is None:
            return None
        return self.enough_at + self.redundancy.wait * (self.enough_at - self.started_at)

    def is_closed(self, now: float) -> bool:
        """Return True if nothing more is waited for: all have ended, or enough, and the time of the rest is over."""
        if len(self.ended) == self.redundancy.started:
            return True
        closes_at = self.closes_at
        return closes_at is not None and now >= closes_at

    @property
    def kept(self) -> list[int]:
        """The completions of the group, by number: the first ``enough`` that ended, or with a ``wait`` all that have ended."""
        most = len(self.ended) if self.redundancy.wait else self.redundancy.enough
        return sorted(self.ended[:most])
