"""The sha256 of every file of a checkpoint: recorded when it is committed, compared before anything of it is loaded.

A flipped byte of the optimizer's moments changes no digest of weights, and PyTorch does not check the checksums of the
archives it reads; those archives may also contain pickled code. So a file is read only if its bytes are the committed ones.

With ``trainer.local_checkpoints`` off a committed checkpoint may be here without its files: the object store has them
(`stored_checkpoints.py`).
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from penstock.protocol.record.checkpoint_state import PARTIAL, STATE_FILE, CheckpointState
from penstock.trainer.errors import CheckpointError

log = structlog.get_logger("trainer.recovery.checkpoint_files")

_THREADS = 8  # hashed at the same time; hashlib releases the interpreter lock


def hash_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below a checkpoint's folder but its state, by relative path."""
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
    found = hash_files(folder)
    problems = [f"{path}: missing" for path in sorted(state.files.keys() - found.keys())]
    problems += [f"{path}: not part of the checkpoint" for path in sorted(found.keys() - state.files.keys())]
    problems += [
        f"{path}: expected sha256 {state.files[path]}, got {found[path]}"
        for path in sorted(state.files.keys() & found.keys())
        if state.files[path] != found[path]
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
    if not (found := (inside / path).resolve()).is_relative_to(inside):
        raise CheckpointError(
            f"{folder / STATE_FILE} names the file {path[:200]!r}, which is not in that folder: it was altered, or a folder in it "
            "is a link; restore the folder from a copy"
        )
    return found


def missing_files(folder: Path, state: CheckpointState) -> list[str]:
    """Return the files of a checkpoint that are not in its folder, by relative path."""
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
