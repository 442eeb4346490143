"""A copy of the trainer's state in memory, which is written to a checkpoint's folder while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.learner.shard_files import Shard


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """One network of one rank, at one moment."""

    tag: str  # its folder in the checkpoint
    shard: Shard
    random_state: bytes = b""  # of this rank; empty: another part has it

    def write(self, folder: Path) -> None:
        """Write it below a checkpoint's folder; raises OSError."""
        self.shard.write(folder / self.tag)
        if self.random_state:
            (folder / random_state_name(self.shard.rank)).write_bytes(self.random_state)


@dataclass(frozen=True, slots=True)
class CapturedState:
    """All networks of one rank, at one moment."""

    parts: Sequence[CapturedPart]

    def write(self, folder: Path) -> None:
        """Write everything below a checkpoint's folder; raises OSError."""
        for part in self.parts:
            part.write(folder)
            crash_points.reach(CrashPoint.SHARD_WRITTEN)


def random_state_name(rank: int) -> str:
    """Return the name of the file with a rank's random state."""
    return f"random_state_{rank}.bin"
