"""Checkpoints: everything a run needs to go on, committed by one rename.

A checkpoint is a folder ``step00000050`` with DeepSpeed's own files (`engine/`), each rank's random
state, and ``state.json``. It is written under another name, every file and folder is fsynced, and the
rename is the commit: a crash leaves the old checkpoint or the new one, never half of one. When something
happened since but no step (groups were dropped, an evaluation ended), only ``state.json`` is replaced, by a
rename too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import structlog

from penstock.protocol.errors import MalformedFact
from penstock.protocol.record.checkpoint_state import (
    PARTIAL,
    STATE_FILE,
    CheckpointState,
    committed,
    folder_name,
    read_state,
)
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError, LeaseLost

log = structlog.get_logger("trainer.checkpoint")


def commit(
    root: Path,
    state: CheckpointState,
    write: Callable[[Path], None],
    *,
    keep: int,
    confirm: Callable[[], None] = lambda: None,
) -> bytes:
    """Write a checkpoint and make it the newest; keeps the newest ``keep``.

    Args:
        root: Folder of the run's checkpoints.
        state: What goes into ``state.json``.
        write: Writes the policy's files into the folder it is given.
        keep: How many checkpoints stay.
        confirm: Called immediately before the rename; what it raises leaves everything as it was.

    Returns:
        The bytes of ``state.json``.

    Raises:
        LeaseLost: A checkpoint of a newer epoch is there.
        CheckpointError: It could not be written; the one before it stands.
    """
    partial, final = partial_of(root, state), root / folder_name(state.step)
    data = state.model_dump_json(indent=1).encode()
    if final.exists() and _is_ours(final, state):
        _replace_state(final, data, confirm)
        return data
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
        (partial / STATE_FILE).write_bytes(data)
        _sync_tree(partial)
    except Exception as err:
        confirm()  # a new holder of the run clears our folder away: then this says so
        if isinstance(err, (OSError, RuntimeError)):  # the latter is torch's word for a disk that is full
            _refuse(partial, err)
        raise
    crash_points.reach(CrashPoint.WRITTEN)
    confirm()
    if final.exists():  # left by a trainer that had lost its lease: it was never acknowledged
        _set_aside(final)
    partial.rename(final)
    _sync(root)
    for old, _ in committed(root)[:-keep]:
        _set_aside(old)
    return data


def partial_of(root: Path, state: CheckpointState) -> Path:
    """Return the folder that a checkpoint is written in before it is committed: each epoch has its own."""
    return root / f"{folder_name(state.step)}.e{state.epoch}{PARTIAL}"


def newest(root: Path, run_id: str) -> tuple[Path, CheckpointState] | None:
    """Return the newest checkpoint and its state, None when there is none.

    Raises CheckpointError when it cannot be read or belongs to another run.
    """
    for leftover in root.glob(f"*{PARTIAL}"):
        shutil.rmtree(leftover)
    try:
        found = committed(root)
    except (OSError, MalformedFact) as err:
        raise CheckpointError(
            f"a checkpoint is not readable ({err}); remove its folder below {root} to go on from the one before it"
        ) from None
    if not found:
        return None
    folder, state = found[-1]
    if state.run_id != run_id:
        raise CheckpointError(f"{folder} belongs to run {state.run_id}, this is run {run_id}")
    return folder, state


def _refuse(partial: Path, err: Exception) -> NoReturn:
    """Give back the space of a checkpoint that could not be written, and say what is to be done."""
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(partial.parent).free
    raise CheckpointError(
        f"{partial.name.split('.')[0]} could not be written below {partial.parent} ({type(err).__name__}: {err}); "
        f"{free / 1e6:.0f} MB are free there. The checkpoint before it stands, and nothing of this one was acknowledged: "
        "make room (trainer.keep_checkpoints, run.dir) and start the trainer again, nothing is lost"
    ) from err


def _is_ours(folder: Path, state: CheckpointState) -> bool:
    """Say whether a folder holds the same weights, of this life or of the one it resumed."""
    there = read_state(folder)
    if there.epoch > state.epoch:
        raise LeaseLost(f"{folder} is of a newer trainer (epoch {there.epoch}, this is {state.epoch}); this one ends")
    return there.weights_digest == state.weights_digest and there.chapter + 1 == state.chapter


def _replace_state(folder: Path, data: bytes, confirm: Callable[[], None]) -> None:
    partial = folder / (STATE_FILE + PARTIAL)
    partial.write_bytes(data)
    _sync(partial)
    crash_points.reach(CrashPoint.WRITTEN)
    confirm()
    partial.rename(folder / STATE_FILE)
    _sync(folder)


def _set_aside(folder: Path) -> None:
    """Remove a checkpoint by a rename first: killed in the midst of it, half a checkpoint would stand in the way."""
    doomed = folder.with_name(folder.name + ".doomed" + PARTIAL)
    folder.rename(doomed)
    shutil.rmtree(doomed)


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
