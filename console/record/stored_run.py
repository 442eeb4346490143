"""Reach the servers of a run, read its objects without them, and start those of a finished local run again for one command.

A run that this machine started together with its NATS and S3 keeps their data in its folder. While it runs, they answer;
afterwards its objects are read from their files, and for the rest ``penstock.deploy.stored`` starts them, runs the command, and
stops them when it ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from penstock.console import connections, launch
from penstock.console.connections import NamedRun
from penstock.console.tools.runs import unknown_run
from penstock.protocol import command_line, logs, streams
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.config.run_file import Loaded
from penstock.protocol.errors import BlobCorrupt, BlobMissing, BusRefused, ConfigError
from penstock.protocol.files import json_value, read_regular
from penstock.protocol.groups import BlobRef
from penstock.protocol.record import run_folder
from penstock.protocol.transport.blobs import Blobs, BlobStat
from penstock.protocol.transport.bus import Bus

_CONNECT_S = 5.0
_MOST_RANKS = 256  # processes that a file in the folder of a run starts
_SET_SERVERS = ", or set nats.url and s3.endpoint"


class StoreFiles(Blobs):
    """The objects of a local store whose server is stopped, read from their files; the run may be resumed meanwhile."""

    def __init__(self, store: Path, settings: S3Settings) -> None:
        super().__init__(settings)
        self._root = (store / "objects" / settings.bucket).resolve()

    def get(self, ref: BlobRef, *, is_expected: bool = True) -> bytes:
        """Return a verified object. Raises BlobMissing or BlobCorrupt."""
        path = self._root / ref.key
        try:
            is_inside = path.resolve() == path and path.is_relative_to(self._root)
            data = read_regular(path, ref.size_bytes + 1) if is_inside else b""
        except (OSError, ValueError):
            data = b""
        if not data:
            raise BlobMissing(f"{path} is missing: it was deleted with its version or step, or the store is incomplete")
        if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise BlobCorrupt(f"{path} does not match its message; restore the store from a copy")
        return data

    def list(self, prefix: str) -> Iterator[BlobStat]:
        for path in sorted((self._root / prefix).parent.rglob("*")):
            key = path.relative_to(self._root).as_posix()
            if key.startswith(prefix) and path.is_file() and not path.is_symlink():
                stat = path.stat()
                yield BlobStat(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC))


def store_files(run: NamedRun) -> StoreFiles | None:
    """Return the objects of a local run whose servers are stopped; None for any other run. Raises ConfigError."""
    store = _own_store(run)
    is_stopped = store is not None and not run_folder.is_locked(store / "lock")
    return StoreFiles(store, run.settings.s3) if store is not None and is_stopped else None


def replay(run: NamedRun, typed: Sequence[str], *, batch: str | None = None) -> list[str]:
    """Return the command line of a replay with the ``typed`` arguments, on as many ranks as the run had, or had at the ``batch``.

    Raises ConfigError.
    """
    path = run.folder / "config.json"
    if batch is not None:
        from penstock.protocol.record import stopped_batch  # noqa: PLC0415  it reads packs, for which pyarrow is imported

        path = stopped_batch.find_batch(run.folder, batch) / stopped_batch.SETTINGS
    try:
        ranks = int(json_value(read_regular(path))["settings"]["trainer"]["num_ranks"]) if path.is_file() else 1
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise ConfigError(f"{path} has no trainer.num_ranks ({type(err).__name__}: {err})") from None
    if not 0 < ranks <= _MOST_RANKS:
        raise ConfigError(f"{path}: trainer.num_ranks = {ranks}, expected 1 to {_MOST_RANKS}; restore the file")
    return launch.trainer(ranks, "replay", *typed)


def replace_process(run: NamedRun, command: Sequence[str]) -> None:
    """Replace this process by a command that reads a run's stores; does not return. Raises ConfigError."""
    store = _own_store(run)
    if store is not None and run_folder.is_locked(store / "lock"):
        os.environ.update(connections.store_environment(store))
    elif store is not None:
        command = launch.module("penstock.deploy.stored", str(store), "--", *command)
    launch.replace_process(command)


def with_servers(run: str, arguments: Sequence[str]) -> NamedRun:
    """Return the run; of a finished local run, restart the command that was typed, together with the run's servers.

    Raises ConfigError for an unknown run.
    """
    named = NamedRun(run, arguments)
    _start_again(_own_store(named))
    return named


def with_local_servers(run: str, arguments: Sequence[str], *, finished_only: bool = False) -> NamedRun:
    """Do as `with_servers` for a run that has a folder here; one without may be on NATS.

    ``finished_only`` is for commands that keep running: with the servers of a stopped, unfinished run they would
    prevent it from being resumed. Raises ConfigError for a run that is neither here nor on NATS, and for one whose servers
    are not known here.
    """
    named = NamedRun(run, arguments)
    if not named.folder.is_dir():
        _require_on_nats(run, named.given)
        return named
    store = _own_store(named)
    if not finished_only or (named.folder / "report.json").exists():
        _start_again(store)
    return named


def _start_again(store: Path | None) -> None:
    if store is not None and not run_folder.is_locked(store / "lock"):
        command = launch.module("penstock", *command_line.typed())
        launch.replace_process(launch.module("penstock.deploy.stored", str(store), "--", *command))


def _require_on_nats(run: str, loaded: Loaded[connections.ConsoleSettings]) -> None:
    """Raise ConfigError when NATS has no streams of a run; a user without the right to list them is not stopped."""
    settings = loaded.settings
    if not connections.is_configured(loaded) and not connections.answers(settings.nats.url):
        raise unknown_run(run, settings.run.dir, more=_SET_SERVERS)
    logs.configure("console", level="error")
    with Bus.connect(settings.nats, name="console", deadline_s=_CONNECT_S) as bus:
        try:
            names = bus.stream_names().wait()
        except BusRefused:
            return
    if streams.stream_name(run, "events") not in names:
        there = sorted(name.removesuffix("-events") for name in names if name.endswith("-events"))
        raise ConfigError(f"no run {run} at {bus.url}; found: {', '.join(there[:10]) or 'none'}; check the name")


def _own_store(run: NamedRun) -> Path | None:
    """Return the data folder of a run's own servers; None when it has none or other servers were configured.

    Raises ConfigError for a run that is not here, and for one whose servers are neither its own nor configured.
    """
    loaded = run.given
    if connections.is_configured(loaded):
        return None
    if not run.folder.is_dir():
        raise unknown_run(run.id, run.folder.parent, more=_SET_SERVERS)
    store = run.folder / connections.STORE
    if store.is_dir():
        return store
    if loaded.origins["s3.endpoint"] == "default" and not connections.answers(loaded.settings.nats.url):
        raise ConfigError(
            f"run {run} keeps its messages and weights on servers of their own, and nats.url and s3.endpoint are not set here; load "
            "their settings (after `penstock up`: . data/environment), or set both"
        )
    return None
