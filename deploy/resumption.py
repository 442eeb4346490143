"""What a person needs to know when a run is stopped or started: the command that resumes it, and notes on its settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from penstock.deploy.settings_notes import notes
from penstock.protocol.config.run_file import config_document, load, split_arguments
from penstock.trainer.recovery.recorded_settings import changed_settings
from penstock.trainer.settings import TrainerSettings


def stopped(verb: str, arguments: Sequence[str]) -> str:
    """Return the line that a stopped command ends with: how to resume it."""
    return f"stopped on request; resume it with: {shlex.join(['penstock', verb, *arguments])}"


def paused(verb: str, arguments: Sequence[str]) -> str:
    """Return the line that a paused run ends with: how to resume it."""
    return f"paused on request; resume it with: {shlex.join(['penstock', verb, *arguments])}"


def start_notes(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that does nothing, and for each that a resumed run changes.

    Raises ConfigError when the settings cannot be read.
    """
    files, overrides = split_arguments(arguments)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=environ)
    folder = loaded.settings.run.folder
    found = [f"note: {note}" for note in notes(loaded)]
    if not any((folder / "checkpoints").glob("step*")):
        return found
    changed = changed_settings(folder / "config.json", json.dumps(config_document(loaded)).encode())
    return [*found, *(f"changed since the last session: {line}" for line in changed)]
