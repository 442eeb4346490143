"""What a person needs to resume a run: the command, and which settings it changes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from penstock.protocol.config.run_file import config_document, load, split_arguments
from penstock.trainer.recovery.recorded_settings import changed_settings
from penstock.trainer.settings import TrainerSettings


def stopped(verb: str, arguments: Sequence[str]) -> str:
    """Return the line that a stopped command ends with: how to resume it."""
    return f"stopped on request; resume it with: {shlex.join(['penstock', verb, *arguments])}"


def changes(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that a run resumed with these arguments changes; none for a run without a checkpoint.

    Raises ConfigError when the settings cannot be read.
    """
    files, overrides = split_arguments(arguments)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=environ)
    folder = loaded.settings.run.folder
    if not any((folder / "checkpoints").glob("step*")):
        return []
    changed = changed_settings(folder / "config.json", json.dumps(config_document(loaded)).encode())
    return [f"changed since the last session: {line}" for line in changed]
