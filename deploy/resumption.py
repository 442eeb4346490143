"""Tell a person how to resume a run, which settings have no effect, and which a resumed run changes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from penstock.protocol.config.run_file import Loaded, config_document, load, split_arguments
from penstock.trainer.recovery.resume_checks import changed_settings
from penstock.trainer.settings import TrainerSettings

_EVALUATION = ("num_prompts", "at_start", "at_end", "temperature", "samples", "max_new_tokens", "environment")


def settings_without_effect(loaded: Loaded[TrainerSettings]) -> list[str]:
    settings, origins = loaded.settings, loaded.origins
    return [
        f"{key} has no effect {why} [{origins[key]}]"
        for key, why in _keys_without_effect(settings)
        if origins.get(key, "default") != "default"
    ]


def _keys_without_effect(settings: TrainerSettings) -> Iterator[tuple[str, str]]:
    if settings.trainer.schedule == "constant" and settings.sft.schedule == "constant":
        yield "trainer.min_lr_ratio", "with trainer.schedule = constant"
    if settings.trainer.max_mismatch is None:
        yield "trainer.mismatch_patience", "without trainer.max_mismatch"
    if settings.trainer.skip_step_above_grad_norm is None:
        yield "trainer.skip_step_after", "without trainer.skip_step_above_grad_norm"
    if not settings.trainer.resume:
        yield "trainer.resume_older_step", "with trainer.resume = false"
    if settings.data.from_run is not None:
        yield from ((key, "with data.from_run") for key in ("data.train", "data.eval"))
    if settings.data.from_run is not None or not settings.evaluated:
        yield from ((f"eval.{name}", "without data.eval") for name in _EVALUATION)


def ended(how: Literal["stopped", "paused"], arguments: Sequence[str]) -> str:
    return f"{how} on request; resume it with: {shlex.join(['penstock', 'train', *arguments])}"


def start_notes(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that does nothing, and for each that a resumed run changes.

    Raises ConfigError when the settings cannot be read.
    """
    files, overrides = split_arguments(arguments)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=environ)
    folder = loaded.settings.run.folder
    notes = [f"note: {note}" for note in settings_without_effect(loaded)]
    if not any((folder / "checkpoints").glob("step*")):
        return notes
    changed = changed_settings(folder / "config.json", json.dumps(config_document(loaded)).encode())
    return [*notes, *(f"changed since the last session: {line}" for line in changed)]
