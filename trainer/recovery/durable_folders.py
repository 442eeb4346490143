"""Folders that a crash leaves whole or not at all: written under another name, fsynced, and committed by one rename."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

from penstock.protocol import files
from penstock.protocol.record.checkpoint_state import PARTIAL
from penstock.trainer.errors import CheckpointError


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
    """Write every file and folder below ``folder`` to disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            files.fsync(Path(parent) / name)
        files.fsync(Path(parent))


def raise_not_written(partial: Path, err: Exception) -> NoReturn:
    """Remove a checkpoint that could not be written, and raise CheckpointError with the free space."""
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(partial.parent).free
    raise CheckpointError(
        f"{partial.name.split('.')[0]} could not be written below {partial.parent} ({type(err).__name__}: {err}); "
        f"{free / 1e6:.0f} MB are free there. The checkpoint before it is unchanged, nothing is lost: free disk space "
        "(trainer.keep_checkpoints, run.dir) and start the trainer again"
    ) from err
