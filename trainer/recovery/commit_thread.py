"""When a checkpoint is due, and the thread that writes one at a time while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.protocol.errors import PenstockError
from penstock.trainer.errors import CheckpointError

_DEADLINE_S = 1800.0  # for one checkpoint, from its copy in memory to the last acknowledgement
_CLOSE_S = 60.0  # a trainer that ends with an error waits no longer for the checkpoint that is being written


class CommitThread:
    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, commit: Callable[[], None], *, step: int) -> None:
        self.wait()
        self._step = step
        self._thread = threading.Thread(target=self._guard, args=(commit,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no commit is under way.

        Raises the error of one that failed, and CheckpointError for one that takes longer than its deadline.
        """
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the checkpoint after step {self._step} is not committed after {self._deadline_s:.0f} s; the checkpoint before it "
                    "is unchanged. Look at the storage of run.dir and at every rank's log, then start the trainer again"
                )
        self.check()

    def check(self) -> None:
        if isinstance(self._failure, PenstockError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the checkpoint's thread ended with an unexpected error") from self._failure

    def close(self) -> None:
        """Let a commit that is under way end, for a minute at most; its error is not raised."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _guard(self, commit: Callable[[], None]) -> None:
        try:
            commit()
        except Exception as err:  # noqa: BLE001  the training thread raises it
            self._failure = err


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
        self._previous_at, self._previous_took_s = now, now - started

    def committed(self, took_s: float) -> None:
        self._write_s = took_s
