"""A copy of the trainer's state in memory, of which every rank writes its own part to a checkpoint while all of them train on.

Rank 0's thread orders it, and each rank writes the copy that `Learner.capture` made. No rank holds more than one such copy.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.trainer import crash_points, process_memory
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.shard_files import Shard
from penstock.trainer.rank_orders import RankOrders, order
from penstock.trainer.ranks import Ranks

_CAPTURE_S = 600.0  # a rank may still be copying when it is asked to write


@dataclass(frozen=True, slots=True)
class CapturedPart:
    tag: str  # its folder in the checkpoint
    shard: Shard
    random_state: bytes = b""  # of this rank; empty: another part has it

    def write(self, folder: Path) -> None:
        self.shard.write(folder / self.tag)
        if self.random_state:
            (folder / random_state_name(self.shard.rank)).write_bytes(self.random_state)


@dataclass(frozen=True, slots=True)
class CapturedState:
    parts: Sequence[CapturedPart]

    def write(self, folder: Path) -> None:
        for part in self.parts:
            part.write(folder)
            crash_points.reach(CrashPoint.SHARD_WRITTEN)


class CaptureSlot:
    """The copy of one rank's state that is to be written; there is at most one."""

    def __init__(self) -> None:
        self._slot: queue.Queue[CapturedState] = queue.Queue(maxsize=1)

    def put(self, captured: CapturedState) -> None:
        """Hold a copy; raises CheckpointError if the one before was not written."""
        try:
            self._slot.put_nowait(captured)
        except queue.Full:
            raise CheckpointError("internal error, please report: a copy of the state was never written") from None

    @order
    def write(self, folder: Path) -> None:
        """Write the copy below a checkpoint's folder, and release it; raises OSError, or CheckpointError without a copy."""
        try:
            captured = self._slot.get(timeout=_CAPTURE_S)
        except queue.Empty:
            raise CheckpointError(f"no state was copied for {folder.name} within {_CAPTURE_S:.0f} s") from None
        captured.write(folder)
        del captured
        process_memory.return_freed_memory()


class CheckpointWriter:
    def __init__(self, own: CaptureSlot, ranks: Ranks | None) -> None:
        """``own`` is this rank's copy. Made on all ``ranks``, of which those but 0 only answer; None: one process is alone."""
        self._orders = RankOrders(own, ranks, "checkpoint", OSError)

    def write(self, folder: Path) -> None:
        """Write them below a folder on storage that all ranks share (rank 0).

        Raises OSError that names the ranks that could not write, RankUnresponsive for one that exited.
        """
        self._orders.ask(CaptureSlot.write, folder)


def random_state_name(rank: int) -> str:
    return f"random_state_{rank}.bin"
