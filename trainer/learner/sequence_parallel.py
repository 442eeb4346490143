"""Sequence parallelism: several ranks compute the tokens of one micro-batch together (Ulysses, arXiv 2309.14509).

In every layer but attention a rank computes a range of the stream's tokens. For attention an all-to-all gives it all tokens of
some of the heads, so attention is that of one rank with the layout of the whole stream: packing and shared prefixes stay exact. A second
all-to-all returns its output to the ranges.

Each rank scores the sampled tokens that its range predicts. The scores are added up over the ranks, so each has all of them and
computes the whole loss. The backward pass of that sum takes the own part only, and the all-to-alls carry gradients as they carried
values: a rank's gradient is its part of the sum, and DeepSpeed adds the parts up as it does those of other rows. It knows
nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from penstock.trainer.ranks import RankSubgroup


@dataclass(frozen=True, slots=True)
class TokenShares:
    """The shares of a stream's tokens; the default is one rank with all of them."""

    group: RankSubgroup | None = None

    @property
    def are_several(self) -> bool:
        return self.group is not None

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's range [1, W, …] of values [1, T, …] of all tokens; the last ranges are filled up with 0."""
        if self.group is None:
            return values
        width = self._width(values.shape[1])
        beside = (0, 0) * (values.dim() - 2)
        padded = F.pad(values, (*beside, 0, width * self.group.size - values.shape[1]))
        return padded[:, self.group.index * width : (self.group.index + 1) * width]

    def num_own(self, num_tokens: int) -> int:
        if self.group is None:
            return num_tokens
        width = self._width(num_tokens)
        return min(width, max(0, num_tokens - self.group.index * width))

    def own_predictors(self, predictors: Tensor, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Find the predictors in this rank's range.

        Args:
            predictors: [N] int64, positions in the stream.
            num_tokens: Tokens of the stream.

        Returns:
            Their positions in the range [n], and their places among all predictors [n]; None: they are all.
        """
        if self.group is None:
            return predictors, None
        width = self._width(num_tokens)
        positions = predictors - self.group.index * width
        places = torch.nonzero((positions >= 0) & (positions < width)).squeeze(1)
        return positions[places], places

    def whole(self, scores: Tensor, places: Tensor | None, num: int) -> Tensor:
        """Return the scores [..., num] of all predictors from the own ones [..., n] in their ``places``; collective."""
        if self.group is None or places is None:
            return scores
        return _Whole.apply(scores, places, num, self.group)  # type: ignore[return-value]

    def sum(self, values: Tensor) -> Tensor:
        return values if self.group is None else self.group.sum(values)

    def by_heads(self, states: Tensor, num_tokens: int) -> Tensor:
        """Exchange the own tokens of all heads [1, H, W, D] for all tokens of the own heads [1, H / S, T, D]; collective.

        Key heads that are fewer than the ranks are repeated first, so that a rank has the one of its query heads.
        """
        if self.group is None:
            return states
        size, heads = self.group.size, states.shape[1]
        if heads < size:
            states = states.repeat_interleave(size // heads, dim=1)
        return _ByHeads.apply(states, self.group)[:, :, :num_tokens]  # type: ignore[index]

    def by_tokens(self, states: Tensor) -> Tensor:
        """Exchange all tokens of the own heads [1, H / S, T, D] for the own tokens of all heads [1, H, W, D]; collective."""
        if self.group is None:
            return states
        missing = self._width(states.shape[2]) * self.group.size - states.shape[2]
        return _ByTokens.apply(F.pad(states, (0, 0, 0, missing)), self.group)  # type: ignore[return-value]

    def _width(self, num_tokens: int) -> int:
        assert self.group is not None
        return -(-num_tokens // self.group.size)


class _Whole(torch.autograd.Function):
    """The sum of zero-filled scores; gradients of the own part only, since every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, places: Tensor, num: int, group: RankSubgroup) -> Tensor:
        ctx.save_for_backward(places)
        filled = scores.new_zeros(*scores.shape[:-1], num)
        return group.sum(filled.index_copy_(-1, places, scores))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(-1, places), None, None, None


class _ByHeads(torch.autograd.Function):
    """[1, H, W, D] of the own tokens to [1, H / S, S W, D] of the own heads."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: RankSubgroup) -> Tensor:
        ctx.group = group
        return _by_heads(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _by_tokens(grads[0], ctx.group), None


class _ByTokens(torch.autograd.Function):
    """[1, H / S, S W, D] of the own heads to [1, H, W, D] of the own tokens."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: RankSubgroup) -> Tensor:
        ctx.group = group
        return _by_tokens(states, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _by_heads(grads[0], ctx.group), None


def _by_heads(states: Tensor, group: RankSubgroup) -> Tensor:
    parts = group.exchange(states[0].unflatten(0, (group.size, -1)))  # [S, H / S, W, D], one range from each rank
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _by_tokens(states: Tensor, group: RankSubgroup) -> Tensor:
    heads = states[0].unflatten(1, (group.size, -1)).transpose(0, 1)
    parts = group.exchange(heads)  # [S, H / S, W, D], some heads from each
    return parts.flatten(0, 1)[None]
