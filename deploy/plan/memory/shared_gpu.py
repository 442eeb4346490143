"""A GPU that one rank of the trainer shares with an engine: whether both fit beside each other, and what their turns cost; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# Assumed, never measured here: what a process has on a GPU besides tensors, pinned host memory over PCIe 4, a model folder in the page cache.
_CONTEXT_BYTES = 600_000_000
_BUS_BYTES_PER_S = 20e9
_LOAD_BYTES_PER_S = 4e9


@dataclass(frozen=True, slots=True)
class SharedGpu:
    card: int  # bytes
    rank: int  # bytes that the rank needs at most
    moved: int  # of these, what it holds between two steps
    weights: int  # bytes of the engine's weights
    row: int  # bytes of keys and values of the longest row
    group_size: int

    @property
    def fits_beside(self) -> bool:
        """Return True if the rank and an engine with room for one group have their memory there at the same time."""
        return self.rank + self.weights + self.group_size * self.row + 2 * _CONTEXT_BYTES <= self.card

    @property
    def fits_in_turns(self) -> bool:
        engine = self.weights + self.group_size * self.row
        return max(self.rank, engine) + 2 * _CONTEXT_BYTES <= self.card

    def mode(self, shared: Literal["auto", "beside", "turns", "never"]) -> Literal["beside", "turns"] | None:
        """Return how the GPU is shared; None: not at all, or it does not fit so."""
        if shared == "auto":
            shared = "beside" if self.fits_beside else "turns"
        if shared == "beside":
            return "beside" if self.fits_beside else None
        return "turns" if shared == "turns" and self.fits_in_turns else None

    @property
    def rows_in_turns(self) -> int:
        """Rows of the longest kind whose keys and values fit beside the weights in the engine's turn."""
        return max(0, self.card - self.weights - 2 * _CONTEXT_BYTES) // max(1, self.row)

    @property
    def change_s(self) -> float:
        """Seconds of a turn to the engine and back: states out and in, weights loaded."""
        return 2 * self.moved / _BUS_BYTES_PER_S + self.weights / _LOAD_BYTES_PER_S

    def shares(self, *, train_s: float, sample_s: float, max_staleness: int) -> tuple[float, float, float]:
        """Return the shares of time in which the trainer computes, the engine does, and they change.

        Args:
            train_s: Seconds of an optimizer step.
            sample_s: Seconds in which the engine samples the batch of one.
            max_staleness: An engine samples one batch more than it, before the trainer makes as many steps.
        """
        steps = max_staleness + 1
        whole_s = steps * (train_s + sample_s) + self.change_s
        return steps * train_s / whole_s, steps * sample_s / whole_s, self.change_s / whole_s

    def lines(
        self, shared: Literal["auto", "beside", "turns", "never"], shares: tuple[float, float, float]
    ) -> Iterator[str]:
        def size(num_bytes: float) -> str:
            return f"{num_bytes / 1e9:.2f} GB"

        engine = f"weights {size(self.weights)}, and {size(self.row)} for each of the longest rows"
        if (mode := self.mode(shared)) is None:
            yield (
                f"a shared GPU of {size(self.card)} (placement.shared = {shared}): not possible; the rank needs {size(self.rank)}, an engine "
                f"{engine}"
            )
        elif mode == "beside":
            free = self.card - self.rank - 2 * _CONTEXT_BYTES
            yield (
                f"a shared GPU of {size(self.card)}: both fit beside each other; the engine has {size(free)} ({free / self.card:.2f} of it): "
                f"{engine}"
            )
        else:
            yield (
                f"a shared GPU of {size(self.card)}, in turns: the trainer's needs {size(self.rank)}, of which {size(self.moved)} move to host "
                f"memory; the engine's has {engine}: {self.rows_in_turns:,} of them"
            )
            trains, samples, changes = shares
            yield (
                f"changing twice takes about {self.change_s:.1f} s (assumed: {_BUS_BYTES_PER_S / 1e9:.0f} GB/s to host memory, "
                f"{_LOAD_BYTES_PER_S / 1e9:.0f} GB/s for weights): trainer {trains:.0%} of the time, engine {samples:.0%}, changes {changes:.0%}"
            )
