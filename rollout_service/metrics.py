"""Counters of what this worker has done, written into its heartbeat."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from penstock.protocol.heartbeats import APPLY_STAGES, apply_figure

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
    apply_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(APPLY_STAGES, 0.0), repr=False)
    turns: int = field(default=0, repr=False)  # on GPUs that the trainer uses too
    turn_wait_s: float = field(default=0.0, repr=False)  # for them
    turn_move_s: float = field(default=0.0, repr=False)  # releasing memory, and loading weights again
    _token_counts: collections.deque[tuple[float, int]] = field(
        default_factory=lambda: collections.deque(maxlen=_WINDOW), repr=False
    )

    @contextlib.contextmanager
    def applying(self, stage: str) -> Iterator[None]:
        """Count the seconds of the block as those of a stage of `heartbeats.APPLY_STAGES`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.apply_s[stage] += time.monotonic() - started

    def snapshot(self, now: float | None = None) -> dict[str, float]:
        """Return all metrics, those of turns where there are some; ``tokens_per_s`` is the mean over about the last ten snapshots."""
        now = time.monotonic() if now is None else now
        self._token_counts.append((now, self.tokens_generated))
        since, then = self._token_counts[0]
        elapsed = now - since
        counters = {counter.name: getattr(self, counter.name) for counter in fields(self) if counter.repr}
        seconds = {apply_figure(stage): spent_s for stage, spent_s in self.apply_s.items()}
        if self.turns:
            counters |= {"turns": self.turns, "turn_wait_s": self.turn_wait_s, "turn_move_s": self.turn_move_s}
        return {**counters, **seconds, "tokens_per_s": (self.tokens_generated - then) / elapsed if elapsed > 0 else 0.0}
