"""Checkpoints of a training on given answers: each rank's shard and ``state.json``, committed by one rename.

A checkpoint is a folder ``step00000050``. It is written under another name, every file is fsynced, and the rename is the
commit: a crash leaves the previous checkpoint or the new one. ``state.json`` has the sha256 of every other file, which are
compared before anything is loaded.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.protocol.record.checkpoint_state import PARTIAL
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.captured_state import CapturedState, CaptureSlot, CheckpointWriter
from penstock.trainer.learner.policy import Policy
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.recovery.checkpoint import commit_folder, hash_files, raise_not_written, remove_folder, sync_tree
from penstock.trainer.recovery.commit_thread import CommitThread

STATE_FILE = "state.json"
_AGAIN = "to begin again from the first step, set trainer.resume=false"
_MAY_DIFFER = frozenset({"trainer.zero_stage"})  # like the number of ranks: what shards are read again by


class TrainingState(BaseModel):
    """The content of ``state.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)  # optimizer steps done
    num_ranks: int
    settings: dict[str, Any]  # those that the weights follow from, by key
    data: dict[str, str]  # sha256 of the rows' files, by use
    metrics_bytes: int = Field(ge=0)  # length of metrics.jsonl
    best_step: int | None = None
    best_loss: float | None = None
    num_since_best: int = 0  # validations
    num_tokens: int = 0  # trained
    seconds: float = 0.0  # of all sessions
    first_loss: float | None = None
    last_loss: float | None = None
    files: dict[str, str] = Field(default={})  # sha256 of the other files


def partial_folder(root: Path, step: int) -> Path:
    return root / f"step{step:08d}{PARTIAL}"


def commit(root: Path, state: TrainingState, write: Callable[[Path], None], *, keep: int) -> None:
    """Write a checkpoint and make it the newest; removes all but the newest ``keep``.

    ``write`` writes every rank's files into the folder it is given. Raises CheckpointError where that fails: the checkpoint
    before it is unchanged.
    """
    partial = partial_folder(root, state.step)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        complete = state.model_copy(update={"files": hash_files(partial)})
        (partial / STATE_FILE).write_text(complete.model_dump_json(indent=1), encoding="utf-8")
        sync_tree(partial)
    except (OSError, RuntimeError) as err:  # torch raises RuntimeError when the disk is full
        raise_not_written(partial, err)
    crash_points.reach(CrashPoint.WRITTEN)
    commit_folder(partial, partial.with_name(partial.name.removesuffix(PARTIAL)))
    crash_points.reach(CrashPoint.COMMITTED)
    for old in _committed(root)[:-keep]:
        remove_folder(old)


def newest(root: Path) -> tuple[Path, TrainingState] | None:
    """Return the newest checkpoint and its state; None if there is none. Raises CheckpointError for a damaged one."""
    for leftover in root.glob(f"*{PARTIAL}"):
        shutil.rmtree(leftover)
    found = _committed(root)
    if not found:
        return None
    folder = found[-1]
    try:
        state = TrainingState.model_validate_json((folder / STATE_FILE).read_bytes())
    except (OSError, ValidationError) as err:
        raise CheckpointError(
            f"checkpoint {folder} has no valid {STATE_FILE} ({err}); remove it, or {_AGAIN}"
        ) from None
    hashes = hash_files(folder)
    if changed := sorted(
        name for name in hashes.keys() | state.files.keys() if hashes.get(name) != state.files.get(name)
    ):
        raise CheckpointError(
            f"checkpoint {folder} is not as it was committed: {changed[0]} has sha256 {hashes.get(changed[0], '(no file)')}, "
            f"expected {state.files.get(changed[0], '(no file)')}; remove the folder to resume from the one before it, or {_AGAIN}"
        )
    return folder, state


def check_same(state: TrainingState, folder: Path, *, settings: Mapping[str, Any], data: Mapping[str, str]) -> None:
    """Raise CheckpointError if another training wrote a checkpoint: it names each setting that differs.

    Any number of ranks and any ZeRO stage continues it; on others than it was written with, the weights are equal up to rounding.
    """
    problems = [
        f"{key} is {settings.get(key)!r}, the checkpoint has {state.settings.get(key)!r}"
        for key in sorted((settings.keys() | state.settings.keys()) - _MAY_DIFFER)
        if settings.get(key) != state.settings.get(key)
    ]
    problems += [
        f"{use} has other rows"
        for use in sorted(data.keys() | state.data.keys())
        if data.get(use) != state.data.get(use)
    ]
    if problems:
        raise CheckpointError(
            f"{folder} is of an unfinished training after {state.step} steps, and this one differs: {'; '.join(problems)}. "
            f"Restore the settings to resume it, choose another run.id, or, {_AGAIN}"
        )


def remove_all(root: Path) -> None:
    for folder in _committed(root):
        remove_folder(folder)
    shutil.rmtree(root, ignore_errors=True)


def _committed(root: Path) -> list[Path]:
    return sorted(folder for folder in root.glob("step*") if folder.suffix != PARTIAL)


log = structlog.get_logger("trainer.fine_tuning.checkpoints")


class BackgroundCheckpoints:
    """The checkpoints of one session; made on every rank at the same place."""

    def __init__(self, policy: Policy, dims: ParallelDims, *, keep: int, on_committed: Callable[[float], None]) -> None:
        """Keep the newest ``keep``; ``on_committed`` is called with the seconds of each one, on its thread (rank 0)."""
        self._policy = policy
        self._keep = keep
        self._on_committed = on_committed
        self._slot = CaptureSlot()
        self.thread = CommitThread()  # rank 0's
        self._writer = CheckpointWriter(self._slot, dims.ranks)

    def begin(self, root: Path | None = None, state: TrainingState | None = None) -> None:
        """Copy this rank's state in memory; rank 0 then has all copies written and committed below ``root``.

        Called on every rank after rank 0's `wait`; ``root`` and ``state`` are given on rank 0.
        """
        self._slot.put(CapturedState([self._policy.capture()]))
        if root is not None and state is not None:
            self.thread.start(lambda: self._commit(root, state), step=state.step)

    def _commit(self, root: Path, state: TrainingState) -> None:
        started = time.monotonic()
        commit(root, state, self._writer.write, keep=self._keep)
        took_s = time.monotonic() - started
        self._on_committed(took_s)
        log.info("checkpoint committed", step=state.step, took_s=round(took_s, 3))
