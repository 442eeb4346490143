"""Checkpoints: everything a run needs to resume, committed by one rename.

A checkpoint is a folder ``step00000050`` with one shard of each rank (`engine/`, `critic/`), each rank's random state, and
``state.json``. It is written under another name, every file and folder is fsynced, and the rename is the commit: a crash
leaves the old checkpoint or the new one, never a partial one. When something changed since but no step was made (groups
were dropped, an evaluation ended), only ``state.json`` is replaced, also by a rename.

``state.json`` has the sha256 of every other file (`hash_files`), and NATS has that of ``state.json``: a file that
was altered since is refused before it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import structlog
from pydantic import ValidationError

from penstock.protocol import files
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

CHECKPOINTS = "checkpoints"  # in the folder of a run
log = structlog.get_logger("trainer.recovery.checkpoint_files")
_THREADS = 8  # hashed at the same time; hashlib releases the interpreter lock


def commit_folder(partial: Path, final: Path) -> None:
    """Give a folder, which `sync_tree` wrote to disk, its final name; a folder of that name is removed."""
    if final.exists():
        remove_folder(final)
    files.replace(partial, final, sync_folder=True)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it, so that a crash leaves no incomplete one under its name."""
    removed = folder.with_name(folder.name + ".removed" + PARTIAL)
    files.replace(folder, removed)
    shutil.rmtree(removed)


def sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            files.fsync(Path(parent) / name)
        files.fsync(Path(parent))


def raise_not_written(partial: Path, err: Exception) -> NoReturn:
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(partial.parent).free
    raise CheckpointError(
        f"{partial.name.split('.')[0]} could not be written below {partial.parent} ({type(err).__name__}: {err}); "
        f"{free / 1e6:.0f} MB are free there. The checkpoint before it is unchanged, nothing is lost: free disk space "
        "(trainer.keep_checkpoints, run.dir) and start the trainer again"
    ) from err


def hash_files(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in _files(folder) if path != STATE_FILE)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(lambda path: _sha256(folder / path), paths), strict=True))


def verify_files(folder: Path, state: CheckpointState) -> None:
    """Compare a checkpoint's files with its state; raises CheckpointError that names each file that differs.

    A checkpoint of a release that recorded no hashes is accepted, with a warning.
    """
    if not state.files:
        log.warning("checkpoint has no hashes of its files; they are not verified", checkpoint=str(folder))
        return
    hashes = hash_files(folder)
    problems = [f"{path}: missing" for path in sorted(state.files.keys() - hashes.keys())]
    problems += [f"{path}: not part of the checkpoint" for path in sorted(hashes.keys() - state.files.keys())]
    problems += [
        f"{path}: expected sha256 {state.files[path]}, got {hashes[path]}"
        for path in sorted(state.files.keys() & hashes.keys())
        if state.files[path] != hashes[path]
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint {folder} is not as it was committed:\n" + "\n".join(f"  {line}" for line in problems) + "\n"
            "Restore the folder from a copy, or remove it and set trainer.resume_older_step to the step of the checkpoint "
            "before it, and make the later steps again"
        )


def path_of(folder: Path, path: str) -> Path:
    """Return where a file of a checkpoint is; raises CheckpointError for one that its state names outside of the folder."""
    inside = folder.resolve()
    if not (resolved := (inside / path).resolve()).is_relative_to(inside):
        raise CheckpointError(
            f"{folder / STATE_FILE} names the file {path[:200]!r}, which is not in that folder: it was altered, or a folder in it "
            "is a link; restore the folder from a copy"
        )
    return resolved


def missing_files(folder: Path, state: CheckpointState) -> list[str]:
    return sorted(path for path in state.files if not (folder / path).is_file())


def _files(folder: Path) -> list[str]:
    return [
        str((Path(parent) / name).relative_to(folder))
        for parent, _, names in os.walk(folder)
        for name in names
        if not name.endswith(PARTIAL)  # a state.json whose replacement was interrupted
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(
    root: Path,
    state: CheckpointState,
    write: Callable[[Path], None],
    *,
    keep: int,
    confirm: Callable[[], None] = lambda: None,
) -> bytes:
    """Write a checkpoint and make it the newest; keeps the newest ``keep``, and returns the bytes of ``state.json``.

    ``write`` is not called where `has_weights_of` is true. ``confirm`` is called immediately before the rename; if it raises, or
    CheckpointError is raised, the previous checkpoint is unchanged. Raises LeaseLost for a checkpoint of a newer epoch.
    """
    partial, final = partial_of(root, state), root / folder_name(state.step)
    if has_weights_of(root, state):
        data = _to_json(state, read_state(final).files)
        _replace_state(final, data, confirm)
        return data
    shutil.rmtree(partial, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    try:
        partial.mkdir()
        write(partial)
        data = _to_json(state, hash_files(partial))
        (partial / STATE_FILE).write_bytes(data)
        sync_tree(partial)
    except Exception as err:
        confirm()  # raises LeaseLost if a new holder of the lease has removed the folder
        if isinstance(err, (OSError, RuntimeError)):  # torch raises RuntimeError when the disk is full
            raise_not_written(partial, err)
        raise
    crash_points.reach(CrashPoint.WRITTEN)
    confirm()
    commit_folder(partial, final)  # one of its name is of a trainer that had lost its lease: never acknowledged
    for old, _ in committed(root)[:-keep]:
        remove_folder(old)
    return data


def has_weights_of(root: Path, state: CheckpointState) -> bool:
    """Return True if the checkpoint before ``state`` holds the same weights: only its ``state.json`` will be replaced.

    One whose files are in the object store alone is written again, so that what NATS does not name yet is whole on the disk.
    Raises LeaseLost for a checkpoint of a newer epoch.
    """
    folder = root / folder_name(state.step)
    if not folder.exists():
        return False
    return _is_ours(existing := read_state(folder), state, folder) and not missing_files(folder, existing)


def partial_of(root: Path, state: CheckpointState) -> Path:
    return root / f"{folder_name(state.step)}.e{state.epoch}{PARTIAL}"


def newest(root: Path, run_id: str) -> tuple[Path, CheckpointState] | None:
    """Return the newest checkpoint and its state, None without any; raises CheckpointError for one of another run."""
    for leftover in root.glob(f"*{PARTIAL}"):
        shutil.rmtree(leftover)
    try:
        checkpoints = committed(root)
    except (OSError, MalformedFact) as err:
        raise CheckpointError(
            f"a checkpoint is not readable ({err}); restore it from a copy, or remove its folder below {root} and "
            "set trainer.resume_older_step to the step of the one before it"
        ) from None
    if not checkpoints:
        return None
    folder, state = checkpoints[-1]
    if state.run_id != run_id:
        raise CheckpointError(
            f"{folder} belongs to run {state.run_id}, this is run {run_id}; set run.id to that, or run.dir to another folder"
        )
    return folder, state


def _to_json(state: CheckpointState, files: Mapping[str, str]) -> bytes:
    data = state.model_copy(update={"files": dict(files)}).model_dump_json(indent=1).encode()
    try:
        CheckpointState.model_validate_json(data)
    except ValidationError as err:
        first = err.errors()[0]
        raise CheckpointError(
            f"the state after step {state.step} is not valid and is not written: {'.'.join(map(str, first['loc']))} = "
            f"{str(first['input'])[:80]}: {first['msg']}. The checkpoint before it is unchanged; report this internal error, "
            "and start the trainer again"
        ) from None
    return data


def _is_ours(existing: CheckpointState, state: CheckpointState, folder: Path) -> bool:
    """Return True if a folder holds the same weights, written by this session or the one it resumed."""
    if existing.epoch > state.epoch:
        raise LeaseLost(
            f"{folder} was written by a newer trainer (epoch {existing.epoch}, this is {state.epoch}); this one exits"
        )
    return existing.weights_digest == state.weights_digest and existing.chapter + 1 == state.chapter


def _replace_state(folder: Path, data: bytes, confirm: Callable[[], None]) -> None:
    partial = folder / (STATE_FILE + PARTIAL)
    partial.write_bytes(data)
    files.fsync(partial)
    crash_points.reach(CrashPoint.WRITTEN)
    confirm()
    files.replace(partial, folder / STATE_FILE, sync_folder=True)
