"""What `penstock sft`, `dpo` and `rm` leave in a run's folder, each below it in a folder such as ``sft-training``.

A folder in which `penstock train` has started too is that of a run, and shown as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.console.report import curves
from penstock.console.report.event_fields import number

COMMANDS = ("sft", "dpo", "rm")
RESULT = "result.json"  # written by the trainer when the model folder is complete, removed when it trains again
_OF_A_RUN = ("metrics.jsonl", "config.json")


@dataclass(frozen=True, slots=True)
class Training:
    """A training on given answers, as far as it came."""

    command: str
    step: int | None  # optimizer steps
    loss: float | None  # of the last step
    eval_loss: float | None  # of the last validation
    losses: tuple[float, ...]  # of each step
    is_finished: bool


def training_folder(folder: Path, command: str) -> Path:
    return folder / f"{command}-training"


def command_of(folder: Path) -> str | None:
    """Return the command that trained last in a run's folder; None for a run, and where none has trained."""
    if any((folder / name).exists() for name in _OF_A_RUN):
        return None
    found = [(when, command) for command in COMMANDS if (when := _changed(training_folder(folder, command)))]
    return max(found)[1] if found else None


def is_finished(folder: Path, command: str) -> bool:
    return (training_folder(folder, command) / RESULT).is_file()


def read(folder: Path) -> Training | None:
    command = command_of(folder)
    if command is None:
        return None
    steps = list(rows(training_folder(folder, command)))
    losses = [value for row in steps if (value := number(row.get("loss"))) is not None]
    eval_losses = [value for row in steps if (value := number(row.get("eval_loss"))) is not None]
    last = steps[-1].get("step") if steps else None
    return Training(
        command=command,
        step=last if isinstance(last, int) else None,
        loss=losses[-1] if losses else None,
        eval_loss=eval_losses[-1] if eval_losses else None,
        losses=tuple(losses),
        is_finished=is_finished(folder, command),
    )


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl, or those of the training in its folder."""
    command = command_of(folder)
    return curves.rows(folder) if command is None else rows(training_folder(folder, command))


def metrics_file(folder: Path) -> Path:
    command = command_of(folder)
    return (folder if command is None else training_folder(folder, command)) / "metrics.jsonl"


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a training's steps; the figures of a validation are among those of the step that it follows."""
    held: dict[str, Any] | None = None
    for row in curves.rows(folder):
        if row.get("kind") == "eval" and held is not None and held.get("step") == row.get("step"):
            held = {**row, **held}
            continue
        if held is not None:
            yield held
        held = {**row, "kind": "step"}
    if held is not None:
        yield held


def _changed(folder: Path) -> float:
    try:
        return (folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        return 0.0
