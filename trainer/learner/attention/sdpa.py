"""Attention over packed rows by torch's `scaled_dot_product_attention`, one node at a time, on every device and dtype.

The tokens of a node attend to their row up to themselves: one call with a causal bias that is aligned to the lower right
(`torch.nn.attention.bias`), for which torch has a kernel with linear memory on CUDA in float32 too. Keys of a shared prefix
are gathered once for each node below it. On a CPU the bias is a matrix of one node's tokens and its row's.

`DenseMask` computes the definition with a mask [T, T]: for checks and tests, and where its name is set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Layout, Node


class DenseMask:
    """Softmax over a mask; exact for every dtype and device, with memory that grows with the square of the tokens."""

    name = "dense"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        del query, value
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        if (mask := layout.prepared.get((self.name, query.device))) is None:
            mask = layout.prepared[self.name, query.device] = torch.from_numpy(layout.mask()).to(query.device)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        return weights.to(value.dtype) @ value


class Sdpa:
    name = "sdpa"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        del query, value
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415  a second of import, where no kernel needs it

        groups = query.shape[1] // key.shape[1]
        outputs, path = [], list[Node]()
        for node in layout.nodes:
            while path and path[-1].subtree_end <= node.start:
                path.pop()
            path.append(node)
            keys, values = (
                torch.cat([held[:, :, some.start : some.end] for some in path], dim=2).repeat_interleave(groups, dim=1)
                for held in (key, value)
            )
            queries = query[:, :, node.start : node.end]
            bias = causal_lower_right(queries.shape[2], keys.shape[2])
            outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale))
        return torch.cat(outputs, dim=2)
