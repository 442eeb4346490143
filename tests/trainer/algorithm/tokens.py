"""Random sampled tokens for the tests of losses and corrections: any lengths, holes and empty rows included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.trainer.algorithm.corrections.interface import Drift
from penstock.trainer.algorithm.losses.tokens import Sequences, Tokens


@dataclass(frozen=True)
class Sample:
    """Log-probabilities of some sequences, with a leaf for the gradient."""

    current: Tensor  # [N] leaf
    anchor: Tensor
    behaviour: Tensor
    advantages: Tensor  # [N]
    by_sequence: Tensor  # [S] advantage of each
    sequences: Sequences

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.current, self.anchor, self.behaviour, self.advantages, self.sequences)


def sample(lengths: list[int], seed: int, *, spread: float = 0.5, stale: bool = True) -> Sample:
    """Build one; without ``stale`` all three log-probabilities are equal."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sequences = Sequences.of_lengths(torch.tensor(lengths))
    num = sum(lengths)
    current = -noise(num).abs() - 0.01
    anchor = (current + spread * noise(num)).clamp(max=-1e-3) if stale else current.clone()
    behaviour = (current + spread * noise(num)).clamp(max=-1e-3) if stale else current.clone()
    by_sequence = noise(len(lengths))
    return Sample(
        current.requires_grad_(), anchor, behaviour, sequences.spread(by_sequence), by_sequence, sequences
    )  # fmt: skip


def drift_of(
    log_ratio: Tensor, sequences: Sequences, advantages: Tensor | None = None, ages: Tensor | None = None
) -> Drift:
    """Return what a correction sees of tokens with these log-ratios to what sampled them."""
    zeros, held = torch.zeros_like(log_ratio), log_ratio.detach()
    return Drift(held, held, zeros if advantages is None else advantages, zeros if ages is None else ages, sequences)


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda values: sum(values) > 0)
seeds = st.integers(0, 10_000)
