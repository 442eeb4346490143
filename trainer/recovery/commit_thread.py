"""Writes one checkpoint at a time while training goes on; its errors are raised on the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.protocol.errors import PenstockError
from penstock.trainer.errors import CheckpointError

_DEADLINE_S = 1800.0  # for one checkpoint, from its copy in memory to the last acknowledgement
_CLOSE_S = 60.0  # a trainer that ends with an error waits no longer for the checkpoint that is being written


class CommitThread:
    """Runs one commit after the other; used by the training thread."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        """Raise an error for a commit that takes longer than ``deadline_s``."""
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a commit is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, commit: Callable[[], None], *, step: int) -> None:
        """Run ``commit`` in a thread, after the one before; raises as `wait` does."""
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
        """Raise the error of a commit that failed, without waiting."""
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
