"""Recognise a run that has ended by itself: its report and model are complete, and nothing is left to do. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.trainer.settings import TrainerSettings

SUMMARY_FILE = "trainer.json"


def finished_notice(settings: TrainerSettings) -> str | None:
    """Return what to tell someone who starts a finished run again; None if the run has something to do.

    A run is finished when its trainer made all ``trainer.steps``, exported the model, evaluated it and exited.
    """
    found = _complete_run(settings.run.folder / SUMMARY_FILE, settings.run.id)
    if found is None or not settings.trainer.resume:
        return None
    done, early = found
    folder = settings.run.folder
    steps = settings.trainer.steps if settings.trainer.epochs is None else _counted_steps(settings)
    if steps is None:
        return None
    if early and done < steps and settings.eval.early_stop:
        return (
            f"run {settings.run.id} is finished after {done} of {steps} steps, it {early}. Its model is in "
            f"{folder / 'model'}, the best version: penstock weights export {settings.run.id} --best --to FOLDER. Nothing was started "
            f"or changed. To train further, set eval.early_stop=0 or a larger number; to train anew, choose another run.id"
        )
    if done < steps:
        return None
    longer = f"trainer.steps above {done}" if settings.trainer.epochs is None else "trainer.epochs"
    return (
        f"run {settings.run.id} is finished: {done} of {steps} steps, model in {folder / 'model'}, report in "
        f"{folder / 'report.md'}. Nothing was started or changed. To train further, raise {longer}; "
        f"to train anew, choose another run.id (run.id={settings.run.id}-2)"
    )


def _counted_steps(settings: TrainerSettings) -> int | None:
    """Return the steps that the last session counted for the same epochs; None if it trained for another length."""
    try:
        recorded: Any = json.loads((settings.run.folder / "config.json").read_bytes())["settings"]
        before, rollout = recorded["trainer"], recorded["rollout"]
        is_same = before["epochs"] == settings.trainer.epochs
        is_same = is_same and rollout["groups_per_step"] == settings.rollout.groups_per_step
        return int(before["steps"]) if is_same else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _complete_run(path: Path, run_id: str) -> tuple[int, str] | None:
    """Return the steps of a run that is complete, and why it ended early; empty if it did not."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # no session has ended yet
    if not isinstance(document, dict) or document.get("run_id") != run_id or document.get("complete") is not True:
        return None
    steps, early = document.get("steps"), document.get("early_stop")
    text = early.get("text") if isinstance(early, dict) else ""
    return (steps, str(text or "")) if isinstance(steps, int) else None
