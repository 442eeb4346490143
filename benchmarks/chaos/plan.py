"""Plan which processes the chaos run kills, and when; pure, and the same for the same seed.

A kill is due when the run has reached a step, after a further delay. Several may be due at the
same step: then one service is killed while another is still restarting. Between them the trainer kills itself
at each of its crash points in turn (`trainer/crash_points.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.trainer.crash_points import CrashPoint

# All but one: every step changes every word of this float32 model, so no anchor is ever stored in addition to a patch.
POINTS = tuple(point for point in CrashPoint if point is not CrashPoint.ANCHOR_STORED)
LAST_STEPS = 5  # too late for a kill: the groups of these steps may all be issued and scored already
LONGEST_DELAY_S = 2.0

# The first version that a process publishes passes these points before any training; the second pass is during training.
_PASSED_AT_THE_START = {
    CrashPoint.OBJECT_STORED, CrashPoint.SHARDS_STORED, CrashPoint.MANIFEST_STORED, CrashPoint.HEAD_MOVED, CrashPoint.ANNOUNCED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """A SIGKILL of ``victim``, ``delay_s`` after the run's step ``step``."""

    step: int
    delay_s: float
    victim: str


def plan_kills(
    seed: int, victims: Sequence[str], *, num_kills: int, steps: int, longest_delay_s: float = LONGEST_DELAY_S
) -> list[PlannedKill]:
    """Return kills in order of their steps: every victim equally often (the remainder drawn at random), at random moments."""
    rng = random.Random(f"kills {seed}")
    chosen = [victim for _ in range(num_kills // len(victims)) for victim in victims]
    chosen += rng.sample(list(victims), num_kills - len(chosen))
    rng.shuffle(chosen)
    moments = sorted(rng.randint(1, steps - LAST_STEPS) for _ in chosen)
    return [
        PlannedKill(step, rng.uniform(0.0, longest_delay_s), victim)
        for step, victim in zip(moments, chosen, strict=True)
    ]


def plan_points(seed: int, num_points: int) -> list[tuple[CrashPoint, int]]:
    """Return crash points in a random order, each with how often a process passes it before it kills."""
    rng = random.Random(f"points {seed}")
    points = rng.sample(POINTS, num_points)
    return [(point, 2 if point in _PASSED_AT_THE_START else 1) for point in points]
