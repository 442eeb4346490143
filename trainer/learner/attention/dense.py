"""Attention over packed rows as its definition says, with a mask [T, T]: for checks and tests, and where its name is set."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Layout


class DenseMask:
    """Softmax over a mask; exact for every dtype and device, with memory that grows with the square of the tokens."""

    name = "dense"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        """Return None: it is plain arithmetic."""
        del query, value
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """Return attention [1, H, T, Dv]; see `backends.Backend`."""
        if (mask := layout.prepared.get((self.name, query.device))) is None:
            mask = layout.prepared[self.name, query.device] = torch.from_numpy(layout.mask()).to(query.device)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        return weights.to(value.dtype) @ value
