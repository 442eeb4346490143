"""Has every rank write its own part of a checkpoint, while all of them train on.

Rank 0's thread orders it over a channel of its own, and each rank writes the copy that it made of its state in memory
(`Learner.capture`). No rank holds more than one such copy.
"""

from __future__ import annotations

import queue
from pathlib import Path

from penstock.trainer import process_memory
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.captured_state import CapturedState
from penstock.trainer.rank_orders import RankOrders, order, serve_orders
from penstock.trainer.ranks import RankChannel

_CAPTURE_S = 600.0  # a rank may still be copying when it is asked to write


class CaptureSlot:
    """The copy of one rank's state that is to be written; there is at most one."""

    def __init__(self) -> None:
        """Hold nothing yet."""
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
    """Writes the copies of all ranks (rank 0)."""

    def __init__(self, own: CaptureSlot, channel: RankChannel | None) -> None:
        """``own`` is rank 0's copy; ``channel`` is None where one process trains alone."""
        self._orders = RankOrders(own, channel, OSError)

    def write(self, folder: Path) -> None:
        """Write them below a folder on storage that all ranks share.

        Raises OSError that names the ranks that could not write, RankUnresponsive for one that exited.
        """
        self._orders.ask(CaptureSlot.write, folder)


def serve_writes(own: CaptureSlot, channel: RankChannel) -> None:
    """Write when rank 0 orders it, in a daemon thread until the process exits (all other ranks)."""
    serve_orders(own, channel, "checkpoint")
