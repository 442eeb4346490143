"""What a model's attention adds to the softmax of scaled products: a window, a cap of the scores, sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    window: int | None = None  # tokens of its row that a token attends to, itself included; None: all before it
    softcap: float | None = None  # c: a score s becomes c tanh(s / c); Gemma 2, arXiv:2408.00118
    sinks: Tensor | None = (
        None  # [H], of each head one more score in its softmax, with a value of 0; gpt-oss, arXiv:2508.10925
    )

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        return self.window is not None, self.softcap is not None, self.sinks is not None

    @property
    def words(self) -> str:
        """Return what it adds, after the heads in an error; empty for plain attention."""
        named = zip(self.kind, ("sliding windows", "capped scores", "attention sinks"), strict=True)
        added = [name for is_there, name in named if is_there]
        return f" with {', '.join(added)}" if added else ""

    def within(self, longest_row: int) -> Variant:
        """Return it without a window that no row is longer than."""
        return replace(self, window=None) if self.window is not None and self.window >= longest_row else self

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


PLAIN = Variant()


def share_beside_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return by what an output without sinks is multiplied, [..., H, T], of the log-sum-exp of its scores and sinks [H]."""
    return torch.sigmoid(lse - sinks.to(lse.dtype).unsqueeze(-1))


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [H] of sinks.

    Args:
        grad: [..., H, T, D] of the output.
        out: [..., H, T, D], sinks included.
        lse: [..., H, T] log-sum-exp of the scores and the sink.
        sinks: [H].
    """
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
    terms = weights * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -terms.sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)
