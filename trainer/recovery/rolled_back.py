"""What a resumed run has to make again: the steps after its checkpoint, read from the end of metrics.jsonl; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The steps that an earlier session made after the checkpoint that the run resumes from.

    Attributes:
        steps: Optimizer steps.
        groups: Groups that they trained; their messages were not acknowledged and are delivered again.
        seconds: Time that the steps took, waiting for their groups included.
    """

    steps: int = 0
    groups: int = 0
    seconds: float = 0.0


def read_rolled_back(lines: bytes) -> RolledBack:
    """Return the cost of the steps in the lines of metrics.jsonl that a resume cuts off; a torn line does not count."""
    steps = groups = 0
    seconds = 0.0
    for line in lines.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the trainer was killed while it wrote this line
            continue
        if isinstance(row, dict) and row.get("kind") == "step":
            steps += 1
            groups += sum(int(_number(count)) for count in _section(row, "scored_by").values())
            seconds += _number(row.get("wait_s")) + _number(row.get("step_s"))
    return RolledBack(steps, groups, seconds)


def describe_rolled_back(found: RolledBack, *, resumed_step: int | None) -> str:
    """Return the sentence for log and panel; "" when a new run starts. ``resumed_step``: of the checkpoint, None without one."""
    if resumed_step is None and not found.steps:
        return ""
    start = (
        f"resumed at step {resumed_step}"
        if resumed_step is not None
        else "no checkpoint was made yet: training starts again at step 0"
    )
    if not found.steps:
        return f"{start}; no step was lost"
    return (
        f"{start}: rolled back {found.steps} steps, {found.groups} groups ({found.seconds:.0f} s of training) since the last "
        "checkpoint; trainer.checkpoint_every_s limits this"
    )


def _section(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = row.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
