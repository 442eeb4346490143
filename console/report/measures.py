"""The measures of a run's success, in one definition for panel, report, plot, list of runs and JSON; pure.

Held-out prompts show accuracy where the reward says what is correct, else the mean reward. An evaluation without ``accuracy`` is one of a reward
without a threshold of success (`trainer/evaluation/eval_result.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Measure = Literal["accuracy", "reward"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation; a value is None if it is unknown."""

    step: int
    accuracy: float | None
    reward: float | None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluations of the primary split by one measure, as ``(step, value)`` in order."""

    measure: Measure = "accuracy"
    points: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        """The measure as a label."""
        return "held-out accuracy" if self.measure == "accuracy" else "held-out mean reward"

    @property
    def before(self) -> float | None:
        """The first value."""
        return self.points[0][1] if self.points else None

    @property
    def now(self) -> float | None:
        """The last value."""
        return self.points[-1][1] if self.points else None


def held_out(evaluations: Sequence[Evaluation]) -> HeldOut:
    """Return what the evaluations of one split show; the last one decides by which measure."""
    if evaluations and evaluations[-1].accuracy is None:
        return HeldOut("reward", tuple((e.step, e.reward) for e in evaluations if e.reward is not None))
    return HeldOut("accuracy", tuple((e.step, e.accuracy) for e in evaluations if e.accuracy is not None))


_RECENT_STEPS = 5


def recent_reward(rewards: Sequence[float]) -> float | None:
    """Return the mean training reward of the last steps: what is called "reward" wherever one number is shown."""
    recent = rewards[-_RECENT_STEPS:]
    return mean(recent) if recent else None


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value; infinite, not an error, where the sum is beyond the largest float."""
    return sum(values) / len(values)
