"""Checkpoints that a thread writes while training goes on, each rank its own shard; one at a time.

training thread   wait for the one before ▸ copy the state in memory ▸ next step …
rank 0's thread                             every rank's shard ▸ state.json ▸ fsync ▸ rename
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.fine_tuning import checkpoints
from penstock.fine_tuning.checkpoints import TrainingState
from penstock.trainer.learner.captured_state import CapturedState, CaptureSlot, CheckpointWriter
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.recovery.commit_thread import CommitThread

log = structlog.get_logger("trainer.fine_tuning.checkpoints")


class BackgroundCheckpoints:
    """The checkpoints of one session; made on every rank at the same place."""

    def __init__(self, policy: Policy, dims: ParallelDims, *, keep: int, on_committed: Callable[[float], None]) -> None:
        """Keep the newest ``keep``; ``on_committed`` is called with the seconds of each one, on its thread (rank 0)."""
        self._policy = policy
        self._keep = keep
        self._on_committed = on_committed
        self._slot = CaptureSlot()
        self._thread = CommitThread()
        self._writer = CheckpointWriter(self._slot, dims.ranks)

    @property
    def is_writing(self) -> bool:
        """Whether one is being written (rank 0)."""
        return self._thread.is_busy

    def check(self) -> None:
        """Raise the error of one that could not be written, without waiting (rank 0)."""
        self._thread.check()

    def wait(self) -> None:
        """Wait until none is being written; raises the error of one that failed (rank 0)."""
        self._thread.wait()

    def begin(self, root: Path | None = None, state: TrainingState | None = None) -> None:
        """Copy this rank's state in memory; rank 0 then has all copies written and committed below ``root``.

        Called on every rank after rank 0's `wait`; ``root`` and ``state`` are given on rank 0.
        """
        self._slot.put(CapturedState([self._policy.capture()]))
        if root is not None and state is not None:
            self._thread.start(lambda: self._commit(root, state), step=state.step)

    def close(self) -> None:
        """Let one that is being written end, for a minute at most."""
        self._thread.close()

    def _commit(self, root: Path, state: TrainingState) -> None:
        started = time.monotonic()
        checkpoints.commit(root, state, self._writer.write, keep=self._keep)
        took_s = time.monotonic() - started
        self._on_committed(took_s)
        log.info("checkpoint committed", step=state.step, took_s=round(took_s, 3))
