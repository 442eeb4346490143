"""The folder of a training below its run's folder, ``runs/<id>/sft-training``: metrics, checkpoints, the best weights.

metrics.jsonl     one line for each step and each validation, as docs/metrics.md describes
checkpoints/      removed when the result is written
best/             model folder of the lowest validation loss, with keep_best; moved to the result
result.json       what the training came to; written when the model folder is complete, removed when it trains again
lock              held while a process trains
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.protocol.files import atomic_write
from penstock.protocol.record import pause_request
from penstock.trainer.errors import RunIsHeld

RESULT = "result.json"


class TrainingFolder:
    """The files of one training (rank 0)."""

    def __init__(self, path: Path) -> None:
        """Create the folder and lock it; raises RunIsHeld while another process of this machine trains in it."""
        path.mkdir(parents=True, exist_ok=True)
        self.checkpoints = path / "checkpoints"
        self._path = path
        self._lock = (path / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunIsHeld(
                f"{path}: another process is training there; wait for it, or choose another run.id"
            ) from None
        self._metrics = (path / "metrics.jsonl").open("ab")

    def rewind(self, num_bytes: int) -> None:
        """Cut metrics.jsonl to its length at a checkpoint: the later steps are made again. An earlier result is no longer one."""
        (self._path / RESULT).unlink(missing_ok=True)
        self._metrics.truncate(num_bytes)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Record that the training is over and its model folder complete."""
        atomic_write(self._path / RESULT, json.dumps(outcome), sync=True)

    @property
    def is_pause_requested(self) -> bool:
        """True while the run is asked to pause: the training writes a checkpoint and ends."""
        return pause_request.is_requested(self._path.parent)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        self._metrics.write(json.dumps({"kind": kind, "at": time.time(), **fields}).encode() + b"\n")
        self._metrics.flush()

    @property
    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl."""
        return self._metrics.seek(0, 2)

    def best(self, step: int) -> Path:
        """Return the folder of the weights after ``step`` steps, if they are the best."""
        return self._path / "best" / f"step{step:08d}"

    def keep_best(self, steps: Collection[int]) -> None:
        """Remove all weights but those of ``steps``."""
        kept = tuple(self.best(step).name for step in steps)
        for folder in (self._path / "best").glob("step*"):
            if not folder.name.startswith(kept):
                shutil.rmtree(folder)

    def close(self) -> None:
        """Close the files and release the lock."""
        self._metrics.close()
        self._lock.close()
