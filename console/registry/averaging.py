"""`penstock model merge RUN --average-last N`: the mean of the newest stored versions of a run."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.console.models.merge import Recipe, merge_folders
from penstock.console.tools.weights import export, stored_versions
from penstock.protocol.errors import ConfigError


def newest(versions: Sequence[int], count: int, run: str) -> list[int]:
    """Return the newest versions, oldest first; raises ConfigError when there are fewer or fewer than two are asked for."""
    if count < 2:
        raise ConfigError(f"--average-last {count}: a mean needs at least 2 versions")
    if len(versions) < count:
        raise ConfigError(
            f"--average-last {count}: run {run} has {len(versions)} stored versions ({', '.join(map(str, versions)) or 'none'}); ask for "
            "fewer, or keep more (trainer.keep_versions)"
        )
    return sorted(versions)[-count:]


def average_last(run: str, count: int, to: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """Write the mean of a run's newest versions as a model folder; return the versions. Raises PenstockError.

    The exported versions need as much disk space as so many models, beside ``to``, until it is written.
    """
    if to.exists():
        raise ConfigError(f"{to} exists; name another folder, or remove it")
    chosen = newest([row["version"] for row in stored_versions(run, arguments, environ)], count, run)
    to.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        folders = [scratch / f"{run}@{version}" for version in chosen]
        with contextlib.redirect_stdout(sys.stderr):
            for version, folder in zip(chosen, folders, strict=True):
                export(run, version, folder, arguments, environ)
        merge_folders(folders, None, to, Recipe("linear", (1.0,) * count))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return chosen
