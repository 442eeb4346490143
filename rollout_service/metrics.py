"""Counters of what this worker has done, written into its heartbeat."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field

_WINDOW = 10  # snapshots over which the speed is measured: ten seconds of heartbeats


@dataclass(slots=True)
class WorkerMetrics:
    packs_announced: int = 0
    groups_generated: int = 0
    tokens_generated: int = 0
    completions_abandoned: int = 0  # started and not kept, since enough of their group had ended
    tokens_abandoned: int = 0
    packs_given_back: int = 0  # an engine failed them; NATS redelivers them
    packs_distrusted: int = 0  # of these, because it was unknown which weights sampled them
    groups_dead_lettered: int = 0
    weights_applied: int = 0
    episodes_stored: int = 0  # ended, and protected until their pack is announced
    episodes_not_stored: int = 0  # of those that should have been
    episodes_continued: int = 0  # that an earlier delivery of their pack had played
    _token_counts: collections.deque[tuple[float, int]] = field(
        default_factory=lambda: collections.deque(maxlen=_WINDOW), repr=False
    )

    def snapshot(self, now: float | None = None) -> dict[str, float]:
        """Return all metrics; ``tokens_per_s`` is the mean over about the last ten snapshots."""
        now = time.monotonic() if now is None else now
        self._token_counts.append((now, self.tokens_generated))
        since, then = self._token_counts[0]
        elapsed = now - since
        return {
            "packs_announced": self.packs_announced,
            "groups_generated": self.groups_generated,
            "tokens_generated": self.tokens_generated,
            "completions_abandoned": self.completions_abandoned,
            "tokens_abandoned": self.tokens_abandoned,
            "packs_given_back": self.packs_given_back,
            "packs_distrusted": self.packs_distrusted,
            "groups_dead_lettered": self.groups_dead_lettered,
            "weights_applied": self.weights_applied,
            "episodes_stored": self.episodes_stored,
            "episodes_not_stored": self.episodes_not_stored,
            "episodes_continued": self.episodes_continued,
            "tokens_per_s": (self.tokens_generated - then) / elapsed if elapsed > 0 else 0.0,
        }
