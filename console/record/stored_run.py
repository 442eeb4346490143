"""Reach the servers of a run, and start those of a finished local run again for one command.

A run that this machine started with its own NATS and S3 keeps their data in its folder. While it runs, they answer;
afterwards ``penstock.deploy.stored`` starts them, runs the command, and stops them when it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.console import connections, launch
from penstock.console.tools.runs import unknown_run
from penstock.protocol import logs, streams
from penstock.protocol.config.run_file import Loaded
from penstock.protocol.errors import BusRefused, ConfigError
from penstock.protocol.files import read_regular
from penstock.protocol.record import run_folder
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.bus import Bus

_CONNECT_S = 5.0
_MOST_RANKS = 256  # processes that a file in the folder of a run starts
_SET_SERVERS = ", or set nats.url and s3.endpoint"


def replay(
    run: str, arguments: Sequence[str], environ: Mapping[str, str], typed: Sequence[str], *, batch: str | None = None
) -> list[str]:
    """Return the command line of a replay with the ``typed`` arguments, on as many ranks as the run had, or had at the ``batch``.

    Raises ConfigError.
    """
    check_run_id(run)
    home = connections.find(arguments, environ).settings.run.dir / run
    path = home / "config.json"
    if batch is not None:
        from penstock.protocol.record import stopped_batch  # noqa: PLC0415  it reads packs, for which pyarrow is imported

        path = stopped_batch.find_batch(home, batch) / stopped_batch.SETTINGS
    try:
        ranks = int(json.loads(read_regular(path))["settings"]["trainer"]["num_ranks"]) if path.is_file() else 1
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise ConfigError(f"{path} has no trainer.num_ranks ({type(err).__name__}: {err})") from None
    if not 0 < ranks <= _MOST_RANKS:
        raise ConfigError(f"{path}: trainer.num_ranks = {ranks}, expected 1 to {_MOST_RANKS}; restore the file")
    return launch.trainer(ranks, "replay", *typed)


def replace_process(run: str, arguments: Sequence[str], environ: Mapping[str, str], command: Sequence[str]) -> None:
    """Replace this process by a command that reads a run's stores; does not return. Raises ConfigError."""
    store = _own_store(run, arguments, environ)
    if store is not None and run_folder.is_locked(store / "lock"):
        os.environ.update(connections.store_environment(store))
    elif store is not None:
        command = launch.module("penstock.deploy.stored", str(store), "--", *command)
    launch.replace_process(command)


def ensure_servers(run: str, arguments: Sequence[str], environ: Mapping[str, str], typed: Sequence[str]) -> None:
    """Restart the ``typed`` command together with the servers of a finished local run; for any other run return.

    Raises ConfigError for an unknown run.
    """
    check_run_id(run)
    _start_again(_own_store(run, arguments, environ), typed)


def ensure_local_servers(
    run: str, arguments: Sequence[str], environ: Mapping[str, str], typed: Sequence[str], *, finished_only: bool = False
) -> None:
    """Call `ensure_servers` for a run that has a folder here; one without may be on NATS.

    ``finished_only`` is for commands that keep running: with the servers of a stopped, unfinished run they would
    prevent it from being resumed. Raises ConfigError for a run that is neither here nor on NATS, and for one whose servers
    are not known here.
    """
    check_run_id(run)
    loaded = connections.find(arguments, environ)
    folder = loaded.settings.run.dir / run
    if not folder.is_dir():
        _require_on_nats(run, loaded)
        return
    store = _own_store(run, arguments, environ)
    if not finished_only or (folder / "report.json").exists():
        _start_again(store, typed)


def _start_again(store: Path | None, typed: Sequence[str]) -> None:
    if store is not None and not run_folder.is_locked(store / "lock"):
        launch.replace_process(
            launch.module("penstock.deploy.stored", str(store), "--", *launch.module("penstock", *typed))
        )


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


def _own_store(run: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Return the data folder of a run's own servers; None when it has none or other servers were configured.

    Raises ConfigError for a run that is not here, and for one whose servers are neither its own nor configured.
    """
    loaded = connections.find(arguments, environ)
    if connections.is_configured(loaded):
        return None
    folder = loaded.settings.run.dir / run
    if not folder.is_dir():
        raise unknown_run(run, folder.parent, more=_SET_SERVERS)
    store = folder / connections.STORE
    if store.is_dir():
        return store
    if loaded.origins["s3.endpoint"] == "default" and not connections.answers(loaded.settings.nats.url):
        raise ConfigError(
            f"run {run} keeps its messages and weights on servers of their own, and nats.url and s3.endpoint are not set here; load "
            "their settings (after `penstock up`: . data/environment), or set both"
        )
    return None
