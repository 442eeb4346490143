"""Recognise a run that has ended by itself: its report and model are complete, and nothing is left to do. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.trainer.settings import TrainerSettings

SUMMARY_FILE = "trainer.json"


def notice(settings: TrainerSettings) -> str | None:
    """Return what to tell someone who starts a finished run again; None if the run has something to do.

    A run is finished when its trainer made all ``trainer.steps``, exported the model, evaluated it and exited.
    """
    done = _steps_of_complete_run(settings.run.folder / SUMMARY_FILE, settings.run.id)
    if done is None or done < settings.trainer.steps or not settings.trainer.resume:
        return None
    folder = settings.run.folder
    return (
        f"run {settings.run.id} is finished: {done} of {settings.trainer.steps} steps, model in {folder / 'model'}, report in "
        f"{folder / 'report.md'}. Nothing was started or changed. To train further, raise trainer.steps above {done}; "
        f"to train anew, choose another run.id (run.id={settings.run.id}-2)"
    )


def _steps_of_complete_run(path: Path, run_id: str) -> int | None:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # no session has ended yet
    if not isinstance(document, dict) or document.get("run_id") != run_id or document.get("complete") is not True:
        return None
    steps = document.get("steps")
    return steps if isinstance(steps, int) else None
