"""The folder of a training below its run's folder, ``runs/<id>/sft-training``: metrics, checkpoints, the best weights.

metrics.jsonl     one line for each step and each validation, as docs/metrics.md describes
config.json       settings of the last session, for trackers
checkpoints/      removed when the result is written
best/             model folder of the lowest validation loss, with keep_best; moved to the result
result.json       the outcome of the training; written when the model folder is complete, removed when it trains again
lock              held while a process trains

The result is a model folder, and with LoRA the adapter beside it in PEFT's format.

A checkpoint is a folder ``step00000050``. It is written under another name, every file is fsynced, and the rename is the
commit: a crash leaves the previous checkpoint or the new one. ``state.json`` has the sha256 of every other file, which are
compared before anything is loaded.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save_file

from penstock.protocol import files
from penstock.protocol.files import atomic_write
from penstock.protocol.record import run_folder
from penstock.protocol.record.checkpoint_state import PARTIAL
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, published_name
from penstock.trainer import crash_points
from penstock.trainer.commit import CommitThread
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError, RunIsHeld
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.shard_files import CapturedState, CaptureSlot, CheckpointWriter
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.recovery.checkpoint import commit_folder, hash_files, raise_not_written, remove_folder, sync_tree

log = structlog.get_logger("trainer.fine_tuning.checkpoints")

STATE_FILE = "state.json"
_AGAIN = "to begin again from the first step, set trainer.resume=false"
_MAY_DIFFER = frozenset({"trainer.zero_stage"})  # like the number of ranks: what shards are read again by

RESULT = "result.json"


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
    """Write a checkpoint and make it the newest; CheckpointError leaves the one before it unchanged."""
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
    checkpoints = _committed(root)
    if not checkpoints:
        return None
    folder = checkpoints[-1]
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


class BackgroundCheckpoints:
    """The checkpoints of one session; made on every rank at the same place."""

    def __init__(self, policy: Policy, dims: ParallelDims, *, keep: int, on_committed: Callable[[float], None]) -> None:
        """Keep the newest ``keep``; ``on_committed`` is called with the seconds of each one, on its thread (rank 0)."""
        self._policy, self._keep, self._on_committed = policy, keep, on_committed
        self._slot = CaptureSlot()
        self.thread = CommitThread()  # rank 0's
        self._writer = CheckpointWriter(self._slot, dims.ranks)

    def begin(self, root: Path | None = None, state: TrainingState | None = None) -> None:
        """Copy this rank's state in memory; rank 0 then has all copies written and committed below ``root``."""
        self._slot.put(CapturedState([self._policy.capture()]))
        if root is not None and state is not None:
            self.thread.start(lambda: self._commit(root, state), step=state.step)

    def _commit(self, root: Path, state: TrainingState) -> None:
        started = time.monotonic()
        commit(root, state, self._writer.write, keep=self._keep)
        took_s = time.monotonic() - started
        self._on_committed(took_s)
        log.info("checkpoint committed", step=state.step, took_s=round(took_s, 3))


class TrainingFolder:
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

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        atomic_write(self._path / "config.json", json.dumps({"settings": settings}), sync=False)

    def rewind(self, num_bytes: int) -> None:
        """Cut metrics.jsonl to its length at a checkpoint: the later steps are made again. An earlier result is no longer one."""
        (self._path / RESULT).unlink(missing_ok=True)
        self._metrics.truncate(num_bytes)

    def finish(self, outcome: Mapping[str, Any]) -> None:
        atomic_write(self._path / RESULT, json.dumps(outcome), sync=True)

    @property
    def is_pause_requested(self) -> bool:
        return run_folder.is_pause_requested(self._path.parent)

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps({"kind": kind, "at": time.time(), **fields}).encode() + b"\n")
        self._metrics.flush()

    @property
    def metrics_bytes(self) -> int:
        return self._metrics.seek(0, 2)

    def best(self, step: int) -> Path:
        return self._path / "best" / f"step{step:08d}"

    def keep_best(self, steps: Collection[int]) -> None:
        kept = tuple(self.best(step).name for step in steps)
        for folder in (self._path / "best").glob("step*"):
            if not folder.name.startswith(kept):
                shutil.rmtree(folder)

    def close(self) -> None:
        self._metrics.close()
        self._lock.close()


@dataclass(frozen=True, slots=True)
class Result:
    folder: Path
    num_steps: int
    weights_of_step: int
    num_tokens: int  # trained on
    first_loss: float
    last_loss: float


def adapter_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + "-adapter")


def write_result(
    policy: Policy,
    dims: ParallelDims,
    folder: Path | None,
    *,
    like: Path,
    changed: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> None:
    """Write the whole model, adapters merged, and the adapters; raises ExportFailed. Collective."""
    place = Path(dims.ranks.broadcast(None if folder is None else str(folder.absolute())))
    export_model(policy, dims, place, like=like, changed=changed, verify=verify)
    config = policy.weights.adapter_config()
    factors = policy.weights.adapter_tensors() if config is not None else {}
    if folder is None or config is None:
        return
    final = adapter_folder(folder)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({published_name(name): tensor for name, tensor in factors.items()}, partial / ADAPTER_WEIGHTS)
    (partial / ADAPTER_CONFIG).write_bytes(_config_json(config, policy.weights.modules_beside_adapters()))
    for written in (partial / ADAPTER_WEIGHTS, partial / ADAPTER_CONFIG, partial):
        files.fsync(written)
    shutil.rmtree(final, ignore_errors=True)
    files.replace(partial, final, sync_folder=True)


def _config_json(config: AdapterConfig, saved: Sequence[str]) -> bytes:
    if not saved:
        return config.to_json()
    fields = json.loads(config.to_json()) | {"task_type": "SEQ_CLS", "modules_to_save": list(saved)}
    return json.dumps(fields, indent=2).encode()


def move_result(source: Path, folder: Path) -> None:
    for old, new in ((source, folder), (adapter_folder(source), adapter_folder(folder))):
        if old.exists():
            shutil.rmtree(new, ignore_errors=True)
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
            files.fsync(new.parent)
