"""Rescored inputs in the stores of local runs: a new local run gets a copy in its own store.

The store of a local run is a folder, which its S3 server serves unchanged: bucket, then key. An input is immutable and its
index is written last, so that it can be copied while the run it was made from is stopped, running or being rescored. The
copy belongs to the new run: either run can be removed without the other.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from pathlib import Path

from penstock.console.connections import COPIED_INPUTS, STORE
from penstock.protocol import blob_keys, files
from penstock.protocol.errors import ConfigError

_OBJECTS = "objects"


def copy_input(name: str, run_folder: Path) -> None:
    """Copy an input into the store of a run's folder, unless it is there; raises ConfigError when no run here has it."""
    source = find(name, run_folder)
    store = run_folder / STORE
    target = store / _OBJECTS / source.parent.parent.name / blob_keys.run_prefix(name)
    if source == target:
        return
    (store / COPIED_INPUTS).mkdir(parents=True, exist_ok=True)
    (store / COPIED_INPUTS / name).touch()
    partial = store / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, symlinks=True)  # a store with links is refused by its servers
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    files.replace(partial, target)


def find(name: str, run_folder: Path) -> Path:
    """Return the folder of an input's objects: the run's own, else that of a run beside it.

    Raises ConfigError when there is none; it names the inputs that there are.
    """
    found = {**dict(_inputs(run_folder.parent)), **dict(_inputs_of(run_folder))}
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"data.from_run = {name}: no local run in {run_folder.parent} has a rescored input of that name; found: "
        f"{', '.join(sorted(found)) or 'none'}{hint}; make it with `penstock rescore RUN --reward NAME --into {name}`, or set "
        "nats.url and s3.endpoint to the servers that have it"
    )


def _inputs(runs: Path) -> Iterator[tuple[str, Path]]:
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        yield from _inputs_of(folder)


def _inputs_of(run_folder: Path) -> Iterator[tuple[str, Path]]:
    for one in sorted((run_folder / STORE / _OBJECTS).glob("*/runs/*")):
        rescored = one / Path(blob_keys.rescored_prefix(one.name)).name
        keys = (f"{blob_keys.rescored_prefix(one.name)}{file.name}" for file in rescored.glob("*"))
        if any(blob_keys.rescored_sha256(one.name, key) for key in keys):
            yield one.name, one
