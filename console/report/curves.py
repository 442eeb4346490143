"""The curves of a run and of a training on given answers, from its metrics.jsonl: a row for each step and evaluation.

`penstock sft`, `dpo` and `rm` write into folders such as ``sft-training`` below a run's folder. A folder in which
`penstock train` has started too is that of a run, and shown as one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.console.report.event_fields import number, read_object
from penstock.console.report.learning import Evaluation, HeldOut, held_out, recent_reward
from penstock.protocol.files import json_value, regular_lines

LOG = "log"  # a script of one's own: the figures that `penstock.DualLogger` sends to the console
GIVEN_ANSWERS = ("sft", "dpo", "rm")
COMMANDS = (*GIVEN_ANSWERS, LOG)
METRICS = "metrics"  # the kind of an event with figures of a script: step, values
CHECKPOINTS = "checkpoints-logged"  # a folder whose metrics.jsonl has the checkpoints of a script
RESULT = "result.json"  # written by the trainer when the model folder is complete, removed when it trains again
_OF_A_RUN = ("metrics.jsonl", "config.json")
_SILENT_S = 120.0  # a script reports every 30 s, also without new figures
_REWARDS = ("reward_mean", "reward", "train/reward")  # as scripts call them
_LOSSES = ("loss", "policy_loss", "train/loss", "train_loss")


@dataclass(frozen=True, slots=True)
class Curves:
    """Points of a run's curves as ``(step, value)``, in order of the steps."""

    rewards: tuple[tuple[int, float], ...] = ()
    accuracies: tuple[tuple[int, float], ...] = ()
    eval_rewards: tuple[tuple[int, float], ...] = ()  # held-out mean reward
    parts: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # of the reward, by name
    last_step: int | None = None

    @property
    def held_out(self) -> HeldOut:
        accuracies, rewards = dict(self.accuracies), dict(self.eval_rewards)
        steps = sorted(accuracies.keys() | rewards.keys())
        return held_out([Evaluation(step, accuracies.get(step), rewards.get(step)) for step in steps])

    @property
    def recent_reward(self) -> float | None:
        return recent_reward([value for _, value in self.rewards])


def read(folder: Path) -> Curves:
    """Return the curves of a run folder; a step repeated after a resume counts once, with its last values."""
    numbered = [row for row in rows(folder) if isinstance(row.get("step"), int)]
    rewarded = [row for row in numbered if number(row.get("reward_mean")) is not None]
    parts: dict[str, list[tuple[int, float]]] = {}
    rewards = []
    for step, row in steps_of(rewarded).items():
        rewards.append((step, float(row["reward_mean"])))
        pairs = row.get("reward_parts")
        for name, value in pairs.items() if isinstance(pairs, dict) else ():
            if (mean := number(value)) is not None:
                parts.setdefault(name, []).append((step, mean))
    evaluations: dict[int, Evaluation] = {}
    split: str | None = None
    for row in numbered:
        reward, accuracy = number(row.get("reward_mean")), number(row.get("accuracy"))
        is_further = row.get("primary") is False
        if row.get("kind") != "eval" or is_further or (accuracy is None and reward is None):
            continue
        split = split or row.get("split")
        if row.get("split") == split:
            evaluations[row["step"]] = Evaluation(row["step"], accuracy, reward)
    ordered = [evaluations[step] for step in sorted(evaluations)]
    return Curves(
        rewards=tuple(rewards),
        accuracies=tuple((e.step, e.accuracy) for e in ordered if e.accuracy is not None),
        eval_rewards=tuple((e.step, e.reward) for e in ordered if e.reward is not None),
        parts={name: tuple(parts[name]) for name in sorted(parts)},
        last_step=next((row["step"] for row in reversed(numbered) if row.get("kind") != "eval"), None),
    )


def steps_of(rows: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the rows of optimizer steps in order; one that is made again after a resume replaces those from it on."""
    steps: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if row.get("kind") != "step" or not isinstance(step, int):
            continue
        if steps and step <= next(reversed(steps)):
            steps = {known: line for known, line in steps.items() if known < step}
        steps[step] = row
    return steps


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl; what cannot be read is skipped, as is a last line that is cut."""
    with contextlib.suppress(OSError):
        lines = regular_lines(folder / "metrics.jsonl")
        yield from (row for line in lines if (row := _row(line)) is not None)


def num_unreadable(folder: Path) -> int:
    """Return how many lines of a run's metrics.jsonl are no rows; one that is still being written does not count."""
    lines = regular_lines(folder / "metrics.jsonl")
    try:
        return sum(1 for line in lines if line.endswith(b"\n") and not line.isspace() and _row(line) is None)
    except FileNotFoundError:
        return 0
    except OSError:
        return 1


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{") or not line.rstrip().endswith(b"}"):  # quickly, as all lines may be none
        return None
    try:
        return json_value(line.decode("utf-8", "replace").encode())
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Training:
    """A training on given answers, as far as it came."""

    step: int | None  # optimizer steps
    loss: float | None  # of the last step
    eval_loss: float | None  # of the last validation
    losses: tuple[float, ...]  # of each step; of a script with rewards, these
    reward: float | None = None  # of a script


def training_folder(folder: Path, command: str) -> Path:
    return folder / f"{command}-training"


def command_of(folder: Path) -> str | None:
    """Return the command that trained last in a run's folder; None for a run, and where none has trained."""
    if any((folder / name).exists() for name in _OF_A_RUN):
        return None
    trainings = [(when, command) for command in COMMANDS if (when := _changed(training_folder(folder, command)))]
    return max(trainings)[1] if trainings else None


def is_training_finished(folder: Path, command: str) -> bool:
    return (training_folder(folder, command) / RESULT).is_file()


def read_training(folder: Path) -> Training | None:
    command = command_of(folder)
    if command is None:
        return None
    steps = list(training_rows(training_folder(folder, command)))
    losses, rewards = _values(steps, _LOSSES), _values(steps, _REWARDS) if command == LOG else []
    eval_losses = [value for row in steps if (value := number(row.get("eval_loss"))) is not None]
    last = steps[-1].get("step") if steps else None
    return Training(
        step=last if isinstance(last, int) else None,
        loss=losses[-1] if losses else None,
        eval_loss=eval_losses[-1] if eval_losses else None,
        losses=tuple(rewards or losses),
        reward=rewards[-1] if rewards else None,
    )


def _values(steps: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[float]:
    known = ([value for name in names if (value := number(row.get(name))) is not None] for row in steps)
    return [values[0] for values in known if values]


def logged_state(folder: Path) -> tuple[str, str]:
    """Return the state of a script's run and what it said of its end."""
    place = training_folder(folder, LOG)
    if (result := read_object(place / RESULT)) is not None:
        return "failed" if result.get("state") == "failed" else "finished", str(result.get("text", ""))
    return "running" if time.time() - _changed(place) < _SILENT_S else "stopped", ""


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl, or those of the training in its folder."""
    command = command_of(folder)
    return rows(folder) if command is None else training_rows(training_folder(folder, command))


def metrics_file(folder: Path) -> Path:
    command = command_of(folder)
    return (folder if command is None else training_folder(folder, command)) / "metrics.jsonl"


def metrics_stamp(file: Path) -> tuple[int, int] | None:
    """Return size and time of a metrics.jsonl, by which a change is seen; None where there is none."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def training_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a training's steps; the figures of a validation, or of another call of a script, are in their step."""
    held: dict[str, Any] | None = None
    for row in rows(folder):
        if held is not None and held.get("step") == row.get("step"):
            held = {**row, **held} if row.get("kind") == "eval" else {**held, **row, "kind": "step"}
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
