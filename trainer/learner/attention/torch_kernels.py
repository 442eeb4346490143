"""Attention over packed rows by what torch brings: softmax over a mask, a kernel for each node, and flex attention.

`Sdpa`: the tokens of a node attend to their row up to themselves: one call with a causal bias that is aligned to the lower right
(`torch.nn.attention.bias`), for which torch has a kernel with linear memory on CUDA in float32 too. Keys of a shared prefix
are gathered once for each node below it. On a CPU the bias is a matrix of one node's tokens and its row's.

`DenseMask` computes the definition with a mask [T, T]: for checks and tests, and where its name is set.

`Flex`: a token attends to an earlier one exactly if it lies in the subtree of that one's node, so the mask is two comparisons with
a table of [T]. Which blocks of the kernel are empty, full or mixed follows from the smallest and largest entries of the
table's blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from penstock.trainer.algorithm.packed_rows import Layout, Node

BLOCK = 128  # tokens; the size that torch's kernels are tuned for


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


class Flex:
    name = "flex"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        """Return None on a GPU; the compiled kernel for the CPU has no backward pass."""
        del value
        return None if query.device.type == "cuda" else f"it needs a GPU, and the model is on {query.device.type}"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        known = layout.prepared.get((self.name, query.device))
        if known is None:
            known = layout.prepared[self.name, query.device] = block_mask(layout, query.device)
        gqa = query.shape[1] != key.shape[1]
        out: Any = _compiled()(query, key, value, block_mask=known, scale=scale, enable_gqa=gqa)
        return out


def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    ends = subtree_ends(layout)
    mixed, full = block_tables(ends)
    on_device = torch.from_numpy(ends).to(device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & (query < on_device[key])

    tables = [part.to(device) for table in (mixed, full) for part in _ordered(table)]
    size = (layout.num_tokens, layout.num_tokens)
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=size)


def subtree_ends(layout: Layout) -> npt.NDArray[np.int64]:
    """Return of each token, [T], the end of its node's subtree: the tokens before it, from the token on, attend to it."""
    lengths = [node.end - node.start for node in layout.nodes]
    return np.repeat(np.array([node.subtree_end for node in layout.nodes], dtype=np.int64), lengths)


def block_tables(ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which blocks of queries and keys are mixed and which are full, each [B, B]; the others are empty."""
    starts = np.arange(0, len(ends), BLOCK)
    last, first = np.maximum.reduceat(ends, starts), np.minimum.reduceat(ends, starts)
    below = starts[:, None] > starts[None]  # the queries of a block come after the keys of another
    stops = np.minimum(starts + BLOCK, len(ends))
    full = below & (stops[:, None] <= first[None])
    some = (below & (starts[:, None] < last[None])) | np.eye(len(starts), dtype=np.bool_)
    return some & ~full, full


def _ordered(table: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of a table has, [1, 1, B] int32, and which first, [1, 1, B, B] int32."""
    order = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(table.sum(1, dtype=np.int32))[None, None], torch.from_numpy(order)[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
