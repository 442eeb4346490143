"""Input and result of every loss: the sampled tokens of a micro-batch, flat, with their sequences.

Padding, prompts and tool output are left out, so that nothing has to be masked, and a packed row
and a padded one give the same tokens. The four log-probabilities of a token have four names:

| name        | policy                                                                             |
|-------------|------------------------------------------------------------------------------------|
| `behaviour` | the engine's, at the version that sampled the token                                |
| `proximal`  | the trainer's, recomputed before the first update on the batch                     |
| `current`   | the trainer's now, with gradient                                                   |
| `reference` | a frozen model's                                                                   |

The denominator of a ratio is the `anchor`, either the behaviour or the proximal policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.trainer.algorithm.lazy_torch import Tensor, torch

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: such a token is far outside every clip, and stays finite


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequence of each token; all tokens of a sequence are in the same micro-batch."""

    index: Tensor  # [N] int64 in 0..count-1
    count: int

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> Sequences:
        """Return the sequences that follow one another with these lengths, [S] int64; 0 is allowed."""
        return cls(torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths), len(lengths))

    def sum(self, values: Tensor) -> Tensor:
        """Add up values [N] by sequence, [S]."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def lengths(self, like: Tensor) -> Tensor:
        """Return the number of tokens of every sequence, [S] in the dtype of ``like``."""
        return self.sum(torch.ones_like(like))

    def mean(self, values: Tensor) -> Tensor:
        """Average values [N] by sequence, [S]; 0 for a sequence without tokens."""
        return self.sum(values) / self.lengths(values).clamp(min=1.0)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the largest value of every sequence, [S]; -inf for a sequence without tokens."""
        start = values.new_full((self.count,), float("-inf"))
        return start.scatter_reduce(0, self.index, values, reduce="amax")

    def spread(self, values: Tensor) -> Tensor:
        """Give every token its sequence's value: [S] -> [N]."""
        return values.index_select(0, self.index)

    def place(self) -> Tensor:
        """Return every token's place in its sequence, [N] int64; tokens of a sequence are in order."""
        order = torch.argsort(self.index, stable=True)
        lengths = self.lengths(self.index)
        starts = lengths.cumsum(0) - lengths
        places = torch.empty_like(self.index)
        places[order] = torch.arange(len(order), device=order.device) - starts.index_select(0, self.index[order])
        return places

    def to_rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Lay values [N] out as [S, T] with a bool mask [S, T]; 0 where there is no token."""
        places = self.place()
        longest = int(places.max()) + 1 if len(places) else 0
        rows = values.new_zeros(self.count, longest)
        mask = torch.zeros(self.count, longest, dtype=torch.bool, device=values.device)
        rows[self.index, places] = values
        mask[self.index, places] = True
        return rows, mask

    def from_rows(self, rows: Tensor) -> Tensor:
        """Undo `to_rows`: [S, T] -> [N]."""
        return rows[self.index, self.place()]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The sampled tokens of a micro-batch, N of them in S whole sequences."""

    current: Tensor  # [N] with gradient
    anchor: Tensor  # [N] denominator of the ratio
    behaviour: Tensor  # [N]
    advantages: Tensor  # [N]
    sequences: Sequences
    turns_of_episodes: Sequences | None = None  # None: every sequence is one turn

    @property
    def turns(self) -> Sequences:
        """The turns: the parts of a sequence that the policy sampled without a gap, one answer each."""
        return self.turns_of_episodes or self.sequences

    @property
    def log_ratio(self) -> Tensor:
        """Log of current / anchor, [N] with gradient, limited to ±20."""
        return (self.current - self.anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def sequence_log_ratio(self) -> Tensor:
        """Mean log-ratio of every sequence, [S] with gradient: the log of its geometric-mean ratio."""
        return self.sequences.mean(self.log_ratio)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One value per sampled token; only ``loss`` carries a gradient."""

    loss: Tensor  # [N]
    ratio: Tensor  # [N] the ratio the loss uses, current / anchor, of the token or of its sequence
    clipped: Tensor  # [N] bool, a clip or mask set the token's gradient to 0
    dual_clipped: Tensor  # [N] bool, the bound for negative advantages did


PolicyLoss = Callable[..., LossTerms]


def none_of(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def clip_terms(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossTerms:
    """Apply PPO's clip, and the dual clip where one is set, to any ratio [N]."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = (bounded > free).detach()
    dual_clipped = none_of(clipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = ((advantages < 0) & (ceiling < loss)).detach()
        loss = torch.where(dual_clipped, ceiling, loss)
    return LossTerms(loss, ratio.detach(), clipped & ~dual_clipped, dual_clipped)


def directional_stop(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return where a token has already moved beyond the clip in the direction its advantage pushes, [N] bool."""
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
