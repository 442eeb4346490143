"""The curves of a run, read from its metrics.jsonl: one row for each step and evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Curves:
    """Points of a run's curves as ``(step, value)``, in order of the steps."""

    rewards: tuple[tuple[int, float], ...] = ()
    accuracies: tuple[tuple[int, float], ...] = ()
    parts: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # of the reward, by name


def read(folder: Path) -> Curves:
    """Return the curves of a run folder; a step repeated after a resume counts once, with its last values."""
    rewards: dict[int, float] = {}
    accuracies: dict[int, float] = {}
    parts: dict[int, dict[str, float]] = {}
    split: str | None = None
    for row in rows(folder):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if row.get("kind") == "step" and isinstance(row.get("reward_mean"), int | float):
            rewards = {s: v for s, v in rewards.items() if s < step}
            parts = {s: v for s, v in parts.items() if s < step}
            rewards[step] = float(row["reward_mean"])
            parts[step] = row.get("reward_parts") or {}
        elif row.get("kind") == "eval" and isinstance(row.get("accuracy"), int | float):
            split = split or row.get("split")
            if row.get("split") == split:
                accuracies[step] = float(row["accuracy"])
    return Curves(tuple(sorted(rewards.items())), tuple(sorted(accuracies.items())), _by_part(parts))


def _by_part(steps: dict[int, dict[str, float]]) -> dict[str, tuple[tuple[int, float], ...]]:
    names = sorted({name for parts in steps.values() for name in parts})
    return {
        name: tuple((step, float(parts[name])) for step, parts in sorted(steps.items()) if name in parts)
        for name in names
    }


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl; a last line that is still being written is skipped."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
