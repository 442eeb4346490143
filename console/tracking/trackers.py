"""The trackers of a run: their settings, checked before a run starts, and `penstock track`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from penstock.console import connections, launch
from penstock.console.tracking.interface import TRACKERS
from penstock.console.tracking.settings import TrackSettings
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import read_regular

MODULE = "penstock.console.tracking"


def load_settings(run: str | None, arguments: Sequence[str], environ: Mapping[str, str]) -> TrackSettings:
    """Load the settings of trackers; a run that is named is found as by `penstock watch`. Raises ConfigError."""
    files, overrides = split_arguments(arguments)
    if run is None:
        return load(TrackSettings, files=files, overrides=overrides, environ=environ).settings
    store = connections.find(arguments, environ, run_id=run).settings.run.folder / connections.STORE
    is_elsewhere = connections.is_configured(connections.find(arguments, environ))
    own = {} if is_elsewhere else connections.store_environment(store)
    loaded = load(TrackSettings, files=files, overrides=[*overrides, f"run.id={run}"], environ={**own, **environ})
    if loaded.origins["tracker"] != "default":
        return loaded.settings
    stored = _stored_trackers(loaded.settings)
    return (
        loaded.settings.model_copy(update={"tracker": stored.tracker, "tracking": stored.tracking})
        if stored
        else loaded.settings
    )


def check(settings: TrackSettings) -> None:
    """Raise ConfigError for a tracker that is unknown or not installed, before anything starts."""
    for one in settings.tracker:
        TRACKERS.find(one.type).value.require_installed()


def _stored_trackers(settings: TrackSettings) -> TrackSettings | None:
    """Return the trackers that a run was started with, from its folder; None when there is no such file."""
    try:
        document = json.loads(read_regular(settings.run.folder / "trackers" / "settings.json", 1024**2))
        return TrackSettings.model_validate(document)
    except (OSError, ValueError):
        return None


def store(settings: TrackSettings) -> None:
    """Write the trackers of a run into its folder, for `penstock track RUN` without its run file."""
    path = settings.run.folder / "trackers" / "settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = settings.model_dump(mode="json", include={"tracker", "tracking"})
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def command(run: str, label: str, arguments: Sequence[str], *flags: str) -> list[str]:
    """Return the command line of the process that writes a run to one tracker."""
    return launch.module(MODULE, run, label, *flags, *arguments)


def track(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, once: bool) -> int:
    """Write a run to all its trackers, each in a process of its own, until it ends; returns the highest exit code."""
    settings = load_settings(run, arguments, environ)
    check(settings)
    if not settings.tracker:
        raise ConfigError(
            'no tracker is set: penstock track RUN tracker=tensorboard, or tracker = ["wandb"] in the run file'
        )
    flags = ["--parent", str(os.getpid()), *(["--once"] if once else [])]
    children = [subprocess.Popen(command(run, one.label, arguments, *flags)) for one in settings.tracker]

    def stop(*_: object) -> None:
        for child in children:
            child.terminate()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
    names = ", ".join(one.label for one in settings.tracker)
    print(f"run {run}: writing to {names}; Ctrl-C stops it, and the same command goes on", file=sys.stderr)
    codes = [child.wait() for child in children]
    return max((code if code >= 0 else 128 - code for code in codes), default=os.EX_OK)
