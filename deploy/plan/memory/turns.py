"""What the turns of trainer and engine on one GPU cost, where it has no room for both; pure."""

from __future__ import annotations

from dataclasses import dataclass

# Assumed, never measured here: pinned host memory over PCIe 4, and a model folder in the page cache.
_BUS_BYTES_PER_S = 20e9
_LOAD_BYTES_PER_S = 4e9


@dataclass(frozen=True, slots=True)
class Turns:
    moved: int  # bytes that a rank holds between two steps
    weights: int  # bytes of the engine's weights
    max_staleness: int  # the engine samples one batch more in a turn, and the trainer makes as many steps in its next
    sample_s: float  # seconds in which the engine samples the batch of a step
    train_s: float  # seconds of an optimizer step

    @property
    def change_s(self) -> float:
        """Seconds of a turn to the engine and back: states out and in, weights loaded."""
        return 2 * self.moved / _BUS_BYTES_PER_S + self.weights / _LOAD_BYTES_PER_S

    def text(self) -> str:
        steps = self.max_staleness + 1
        whole_s = steps * (self.train_s + self.sample_s) + self.change_s
        trains, samples = (steps * seconds / whole_s for seconds in (self.train_s, self.sample_s))
        return (
            f"in turns the figures above do not overlap: {steps} batches are sampled, then trained; two changes take about "
            f"{self.change_s:.1f} s for {self.moved / 1e9:.2f} GB to host memory ({_BUS_BYTES_PER_S / 1e9:.0f} GB/s assumed) and back, and "
            f"{self.weights / 1e9:.2f} GB of weights ({_LOAD_BYTES_PER_S / 1e9:.0f} GB/s): trainer {trains:.0%} of the time, engine "
            f"{samples:.0%}, changes {1 - trains - samples:.0%}"
        )
