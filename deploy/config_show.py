"""`penstock config show run.toml`: every setting of trainer, rollout worker, reward service and trackers, with its origin.

With ``--command`` the settings are those that `penstock sft`, `dpo` or `rm` would train with, and what it does not read is refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.console.tracking.trackers import TrackSettings
from penstock.deploy.resumption import settings_without_effect
from penstock.fine_tuning.sections import DPO, RM, SFT, OwnSection
from penstock.protocol.config.run_file import Loaded, config_document, format_config, load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.process_end import error_text
from penstock.protocol.secret_values import hide
from penstock.reward_service.settings import RewardSettings
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.settings import TrainerSettings

SERVICES: tuple[type[BaseModel], ...] = (TrainerSettings, RolloutSettings, RewardSettings, TrackSettings)
TRAIN = "train"
FINE_TUNING: dict[str, OwnSection] = {section.section: section for section in (SFT, DPO, RM)}
_ERROR = 2  # exit code of settings that are refused


def load_all(files: Sequence[Path], overrides: Sequence[str], environ: Mapping[str, str]) -> list[Loaded[Any]]:
    """Return the settings of every service; raises ConfigError that lists the errors of all of them, each once."""
    loaded, problems = [], []
    for service in SERVICES:
        try:
            loaded.append(load(service, files=files, overrides=overrides, environ=environ))
        except ConfigError as err:
            problems += str(err).splitlines()
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return loaded


def load_for(
    command: str, files: Sequence[Path], overrides: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[Loaded[Any]], list[str]]:
    """Return the settings of a command, and the keys of its run files that it does not read.

    Raises ConfigError for those that it refuses, and for an unknown command.
    """
    if command == TRAIN:
        return load_all(files, overrides, environ), []
    if command not in FINE_TUNING:
        raise ConfigError(f"--command {command}: expected {', '.join((TRAIN, *FINE_TUNING))}")
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=environ)
    settings, unread = FINE_TUNING[command].chosen_settings(loaded, overrides)
    return [Loaded(settings, loaded.origins)], unread


def as_text(services: Sequence[Loaded[Any]]) -> str:
    """Return one line for each setting; a section that several services read is shown once."""
    lines: dict[str, str] = {}
    for loaded in services:
        for line in format_config(loaded).splitlines(keepends=True):
            lines.setdefault(line.partition(" = ")[0], line)
    return "".join(lines.values())


def as_document(services: Sequence[Loaded[Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"settings": {}, "origins": {}}
    for loaded in services:
        document = config_document(loaded)
        for section, values in hide((), document["settings"]).items():
            shared = merged["settings"].get(section, {})
            merged["settings"][section] = (
                values | shared if isinstance(values, dict) else values
            )  # [[tracker]] is a list
        merged["origins"] = document["origins"] | merged["origins"]
    return merged


def print_settings(arguments: Sequence[str], command: str, *, as_json: bool) -> int:
    """Print the settings; returns 2 for settings that a service refuses, after the reason on stderr."""
    files, overrides = split_arguments(arguments)
    try:
        services, unread = load_for(command, files, overrides, os.environ)
    except ConfigError as err:
        sys.stderr.write(error_text(f"{err}\n"))
        return _ERROR
    if as_json:
        document = as_document(services) | ({} if command == TRAIN else {"unread": unread})
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        notes = [f"penstock {command} does not read {key}" for key in unread]
        if command == TRAIN:
            notes = settings_without_effect(services[0])
        sys.stdout.write(as_text(services) + "".join(f"# note: {note}\n" for note in notes))
    return 0


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("config", "show")
