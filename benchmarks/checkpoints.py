"""Measure for how long training stands still for a checkpoint: written in the step, and copied and written by a thread.

python -m benchmarks.checkpoints                      # 33 and 135 million parameters, random weights; minutes
python -m benchmarks.checkpoints --only standard --repeat 5

One process trains a model of `benchmarks.trainer_memory` on a short batch, and makes checkpoints with the trainer's own
`checkpoint.commit`: shards, fsync, sha256 of every file, rename. Seconds are wall time; what a commit costs on
NATS and S3 is not in them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from benchmarks.trainer_memory import CONFIGURATIONS, Trained, fields_of, inputs_of

from penstock.deploy.plan.memory.estimate import checkpoint_copy
from penstock.deploy.plan.memory.model_shape import shape_of
from penstock.protocol.facts import BlobRef
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import AccountState
from penstock.trainer.commit import CommitThread
from penstock.trainer.learner.shard_files import CapturedState, CaptureSlot, CheckpointWriter
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import checkpoint

_NOTHING = BlobRef(key="none", size_bytes=0, sha256="0" * 64)


class Checkpoints:
    """The checkpoints of one model in one folder, of which the newest stays."""

    def __init__(self, trained: Trained, root: Path) -> None:
        self._trained, self._root = trained, root
        self._slot, self.thread = CaptureSlot(), CommitThread()
        self._writer = CheckpointWriter(self._slot, None)
        self._step = 0
        self.copied_bytes = 0

    def written_in_the_step(self) -> None:
        """Copy and write; return when it is committed."""
        self.begin()
        self.thread.wait()

    def begin(self) -> None:
        """Copy, and let the thread write."""
        self._step += 1
        state = CheckpointState(
            run_id="bench", epoch=1, step=self._step, version=self._step, weights_digest=f"{self._step:064d}",
            weights_dtype="float32", ledger=(), dispatch={}, totals={}, account=AccountState(), metrics_bytes=0,
            record=_NOTHING, chapter=self._step,
        )  # fmt: skip
        part = self._trained.policy.capture()
        self.copied_bytes = part.shard.size_bytes
        self._slot.put(CapturedState([part]))
        self.thread.start(lambda: self._commit(state), step=self._step)

    def _commit(self, state: CheckpointState) -> None:
        checkpoint.commit(self._root, state, self._writer.write, keep=1)


def measure(name: str, repeat: int, row_tokens: int, folder: Path, dims: ParallelDims) -> str:
    chosen = replace(CONFIGURATIONS[name], prompt=row_tokens // 2, answer=row_tokens // 2, group_size=4, groups=1)
    trained = Trained(chosen, dims)
    micro_batches = trained.micro_batches(chosen)
    checkpoints = Checkpoints(trained, folder)

    def step() -> None:
        trained.policy.train_step(micro_batches, trained.objective)

    step()  # makes the optimizer's states
    seconds: dict[str, list[float]] = {kind: [] for kind in ("sync", "copy", "step", "beside")}
    for _ in range(repeat):
        seconds["step"].append(_timed(step))
        seconds["sync"].append(_timed(checkpoints.written_in_the_step))
        seconds["copy"].append(_timed(checkpoints.begin))
        seconds["beside"].append(_timed(step))
        checkpoints.thread.wait()
    middle = {kind: statistics.median(found) for kind, found in seconds.items()}
    shape = shape_of(fields_of(chosen), name)
    planned = checkpoint_copy(shape, inputs_of(chosen).method)
    return (
        f"| {name}, {shape.parameters / 1e6:.0f} M | {planned / 1e6:,.0f} | {checkpoints.copied_bytes / 1e6:,.0f} | {middle['sync']:.2f} "
        f"| {middle['copy']:.2f} | {middle['sync'] / middle['copy']:.1f}x | {middle['step']:.2f} | {middle['beside']:.2f} |"
    )


def _timed(action: Callable[[], None]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=["standard", "smollm2-135m"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--row-tokens", type=int, default=64, help="tokens of each of the 4 rows of a step")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.0f}, torch {version('torch')}")
    print(
        "| model | copy planned, MB | copied, MB | written in the step, s | copied in the step, s | less by | a step alone, s "
        "| the step beside the write, s |\n|---|---|---|---|---|---|---|---|"
    )
    dims = ParallelDims(Ranks())
    for name in options.only:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(measure(name, options.repeat, options.row_tokens, Path(folder), dims), flush=True)


if __name__ == "__main__":
    main()
