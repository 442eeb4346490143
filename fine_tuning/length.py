"""How long a training is: its steps, the rows of each, and when validations end it early; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.protocol.errors import ConfigError
from penstock.trainer.errors import TrainingDiverged


@dataclass(frozen=True, slots=True)
class Length:
    """Steps over positions 0, 1, 2, … of the data's order, which begins again after each epoch."""

    num_rows: int
    batch_size: int
    num_steps: int
    num_positions: int  # of all steps: the last one may have fewer than batch_size

    @classmethod
    def of(cls, num_rows: int, batch_size: int, *, steps: int, epochs: float | None) -> Length:
        """Return the length of ``epochs`` passes over the rows, or of ``steps`` steps if there are none."""
        if epochs is None:
            return cls(num_rows, batch_size, steps, steps * batch_size)
        positions = max(1, round(epochs * num_rows))
        return cls(num_rows, batch_size, math.ceil(positions / batch_size), positions)

    def positions(self, step: int) -> range:
        first = step * self.batch_size
        return range(first, min(first + self.batch_size, self.num_positions))

    def epoch_after(self, step: int) -> float:
        return min(step * self.batch_size, self.num_positions) / self.num_rows


def check_warmup(section: str, warmup_steps: int, length: Length) -> None:
    if warmup_steps > length.num_steps:
        raise ConfigError(
            f"{section}.warmup_steps = {warmup_steps}, and {length.num_rows} rows make {length.num_steps} steps of "
            f"{section}.batch_size = {length.batch_size}; lower it, so that the peak is reached"
        )


@dataclass(frozen=True, slots=True)
class Best:
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
