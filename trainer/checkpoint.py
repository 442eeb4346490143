"""Checkpoints: everything a run needs to go on, committed by one rename.

A checkpoint is a folder ``step00000050`` with DeepSpeed's own files (`engine/`), each rank's random
state, and ``state.json``. It is written under another name, every file and folder is fsynced, and the
rename is the commit: a crash leaves the old checkpoint or the new one, never half of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field, ValidationError

from protocol.facts import Count, Identifier, Wire
from trainer.errors import CheckpointError

log = structlog.get_logger("trainer.checkpoint")

_STATE = "state.json"
_PREFIX = "step"
_PARTIAL = ".partial"


class TrainerState(Wire):
    """What the trainer knows besides weights and optimizer; written with every checkpoint."""

    run_id: Identifier
    step: Count  # optimizer steps done
    version: Count  # policy version of these weights
    ledger: tuple[tuple[int, tuple[str, ...]], ...]  # (version it was trained at, group ids)
    dispatch: dict[str, Any]  # the data cursor and what is outstanding, as `trainer/dispatch.py` writes it
    totals: dict[str, Any]  # counters of the whole run, as `trainer/tally.py` writes them
    algorithm: dict[str, Any] = Field(
        default={}
    )  # what the algorithm remembers, as `trainer/algorithm_state.py` writes it
    metrics_bytes: Count  # length of metrics.jsonl: lines after it belong to steps that are taken again


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` optimizer steps."""
    return root / f"{_PREFIX}{step:08d}"


def partial_of(root: Path, step: int) -> Path:
    """Return the folder that a checkpoint is written in before it is committed."""
    return root / f"{_PREFIX}{step:08d}{_PARTIAL}"


def commit(root: Path, state: TrainerState, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint and make it the newest; keeps the newest ``keep``.

    Args:
        root: Folder of the run's checkpoints.
        state: What goes into ``state.json``.
        write: Writes the policy's files into the folder it is given.
        keep: How many checkpoints stay.

    Returns:
        The folder of the committed checkpoint.
    """
    partial, final = partial_of(root, state.step), folder_of(root, state.step)
    if final.exists():  # resumed from it and stopped again before another step
        return final
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    (partial / _STATE).write_text(state.model_dump_json(indent=1))
    _sync_tree(partial)
    partial.rename(final)
    _sync(root)
    for old in _committed(root)[:-keep]:
        shutil.rmtree(old)
    return final


def newest(root: Path, run_id: str) -> tuple[Path, TrainerState] | None:
    """Return the newest checkpoint and its state, None when there is none.

    Raises CheckpointError when it cannot be read or belongs to another run.
    """
    for leftover in root.glob(f"*{_PARTIAL}"):
        shutil.rmtree(leftover)
    folders = _committed(root)
    if not folders:
        return None
    folder = folders[-1]
    try:
        state = TrainerState.model_validate_json((folder / _STATE).read_bytes())
    except (OSError, ValidationError) as err:
        raise CheckpointError(
            f"{folder / _STATE} is not readable ({err}); remove {folder} to go on from the checkpoint before it"
        ) from None
    if state.run_id != run_id:
        raise CheckpointError(f"{folder} belongs to run {state.run_id}, this is run {run_id}")
    return folder, state


def _committed(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{_PREFIX}*") if path.is_dir() and not path.name.endswith(_PARTIAL))


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
