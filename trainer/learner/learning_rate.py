"""The learning rate over the steps of a run; pure."""

from __future__ import annotations

import math

from penstock.trainer.fine_tuning_settings import Schedule


def lr_factor(step: int, *, schedule: Schedule, num_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Return the factor of the peak learning rate at optimizer step ``step`` (0 is the first).

    Warm-up rises linearly to 1, starting above 0 at the first step; then the schedule falls from 1 to
    ``min_lr_ratio`` at the last step (`constant`: stays at 1).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
    fall = progress if schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - min_lr_ratio) * fall
