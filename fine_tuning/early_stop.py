"""Compares validation losses: which weights are the best so far, and when no further step is worth making; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.trainer.errors import TrainingDiverged


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest validation loss so far."""

    step: int | None = None
    loss: float = math.inf
    num_since: int = 0  # validations since then

    def after(self, step: int, loss: float) -> Best:
        """Return the state after another validation; raises TrainingDiverged for a loss that is no number."""
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the validation loss after step {step} is {loss}; lower the learning rate, and start again from the last "
                "checkpoint, or with trainer.resume=false from the beginning"
            )
        return Best(step, loss) if loss < self.loss else replace(self, num_since=self.num_since + 1)

    def ends(self, limit: int) -> bool:
        """Return True if ``limit`` validations in a row were not better; never for 0."""
        return 0 < limit <= self.num_since
