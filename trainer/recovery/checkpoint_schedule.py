"""When a checkpoint is due: by steps, and by time; pure."""

from __future__ import annotations

_MAX_TIME_SHARE = 0.05  # training stands still for checkpoints by time for at most this share of a run
_MAX_WRITE_SHARE = 0.5  # a thread writes checkpoints by time for at most this share of it


class CheckpointSchedule:
    """Decides after each step whether a checkpoint is due.

    Besides every ``every_steps`` steps, one is due ``every_s`` seconds after the previous one, or later where writing takes
    long: a checkpoint for which training stood still for 60 s is followed by the next one by time after 20 minutes, one that a
    thread wrote for 60 s after 2 minutes.
    """

    def __init__(self, *, every_steps: int, every_s: float, now: float) -> None:
        """Start counting at ``now``, in seconds of a monotonic clock; ``every_s`` 0 means by steps only."""
        self._every_steps = every_steps
        self._every_s = every_s
        self._previous_at = now
        self._previous_took_s = 0.0
        self._write_s = 0.0

    def is_due(self, step: int, now: float, *, is_writing: bool = False) -> bool:
        """Return True if a checkpoint is due after ``step`` steps; while one ``is_writing``, none is due by time."""
        if step % self._every_steps == 0:
            return True
        if is_writing:
            return False
        pause_s = max(self._every_s, self._previous_took_s / _MAX_TIME_SHARE, self._write_s / _MAX_WRITE_SHARE)
        return self._every_s > 0 and now - self._previous_at >= pause_s

    def written(self, *, started: float, now: float) -> None:
        """Take note of a checkpoint for which training stood still from ``started`` to ``now``."""
        self._previous_at, self._previous_took_s = now, now - started

    def committed(self, took_s: float) -> None:
        """Take note that a thread wrote the previous checkpoint for ``took_s`` s; may be called on that thread."""
        self._write_s = took_s
