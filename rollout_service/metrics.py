"""What this worker has done, counted; shown in its heartbeat."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field

_WINDOW = 10  # readings over which the speed is taken: ten seconds of heartbeats


@dataclass(slots=True)
class Figures:
    """Counters of one worker's life; every discarded datum is in one of them."""

    packs_announced: int = 0
    groups_generated: int = 0
    tokens_generated: int = 0
    packs_given_back: int = 0  # an engine failed them; they come again
    packs_distrusted: int = 0  # of these, because nobody knew which weights sampled them
    groups_dead_lettered: int = 0
    weights_applied: int = 0
    _readings: collections.deque[tuple[float, int]] = field(
        default_factory=lambda: collections.deque(maxlen=_WINDOW), repr=False
    )

    def reading(self, now: float | None = None) -> dict[str, float]:
        """Return all figures; ``tokens_per_s`` is the speed since about ten readings ago."""
        now = time.monotonic() if now is None else now
        self._readings.append((now, self.tokens_generated))
        since, then = self._readings[0]
        elapsed = now - since
        return {
            "packs_announced": self.packs_announced,
            "groups_generated": self.groups_generated,
            "tokens_generated": self.tokens_generated,
            "packs_given_back": self.packs_given_back,
            "packs_distrusted": self.packs_distrusted,
            "groups_dead_lettered": self.groups_dead_lettered,
            "weights_applied": self.weights_applied,
            "tokens_per_s": (self.tokens_generated - then) / elapsed if elapsed > 0 else 0.0,
        }
