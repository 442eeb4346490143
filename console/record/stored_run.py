"""Commands about what a run has stored: they also reach the store of a local run that is over.

A run that this machine started with its own servers keeps them in its folder. While it runs, they answer; when it is
over, ``penstock.deploy.stored`` starts them again beside the command, and ends them with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.console import connections, launch
from penstock.console.tools.runs import is_locked, list_folder
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id


def replay(
    run: str, arguments: Sequence[str], environ: Mapping[str, str], options: Sequence[str], *, as_json: bool
) -> list[str]:
    """Return the command line of a replay, on as many ranks as the run had. Raises ConfigError."""
    check_run_id(run)
    path = connections.find(arguments, environ).settings.run.dir / run / "config.json"
    try:
        ranks = int(json.loads(path.read_bytes())["settings"]["trainer"]["num_ranks"]) if path.is_file() else 1
    except (ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"{path} does not say how many ranks the run had ({type(err).__name__}: {err})") from None
    return launch.trainer(ranks, "replay", run, *arguments, *options, *(["--json"] if as_json else []))


def become(run: str, arguments: Sequence[str], environ: Mapping[str, str], command: Sequence[str]) -> None:
    """Become a command that reads what a run has stored; does not return. Raises ConfigError."""
    store = _own_store(run, arguments, environ)
    if store is not None and is_locked(store / "lock"):
        os.environ.update(connections.store_environment(store))
    elif store is not None:
        command = launch.module("penstock.deploy.stored", str(store), "--", *command)
    launch.become(command)


def reach(run: str, arguments: Sequence[str], environ: Mapping[str, str], typed: Sequence[str]) -> None:
    """Begin anew, with what was ``typed``, beside the servers of a local run that is over; else return.

    Raises ConfigError for a run that nobody knows.
    """
    check_run_id(run)
    store = _own_store(run, arguments, environ)
    if store is not None and not is_locked(store / "lock"):
        launch.become(launch.module("penstock.deploy.stored", str(store), "--", *launch.module("penstock", *typed)))


def beside(
    run: str, arguments: Sequence[str], environ: Mapping[str, str], typed: Sequence[str], *, finished_only: bool = False
) -> None:
    """Do as `reach` does for a run that has a folder here; one that has none may be where NATS is by default.

    ``finished_only`` is for commands that stay: beside the servers of a run that was only stopped they would keep it
    from going on.
    """
    check_run_id(run)
    folder = connections.find(arguments, environ).settings.run.dir / run
    if folder.is_dir() and not (finished_only and not (folder / "report.json").exists()):
        reach(run, arguments, environ, typed)


def _own_store(run: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the servers that a run of this machine has to itself; None when others were named."""
    loaded = connections.find(arguments, environ)
    if connections.is_configured(loaded):
        return None
    folder = loaded.settings.run.dir / run
    if not folder.is_dir():
        others = ", ".join(line.run for line in list_folder(folder.parent)[:5]) or "none"
        raise ConfigError(
            f"no run {run} in {folder.parent}/; there: {others}. Or say where it is: nats.url, s3.endpoint"
        )
    store = folder / connections.STORE
    return store if store.is_dir() else None
