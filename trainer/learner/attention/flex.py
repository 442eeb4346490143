"""Attention over packed rows by torch's `flex_attention`, compiled for the GPU, without a matrix [T, T].

A token attends to an earlier one exactly if it lies in the subtree of that one's node, so the mask is two comparisons with
a table of [T]. Which blocks of the kernel are empty, full or mixed follows from the smallest and largest entries of the
table's blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from penstock.trainer.algorithm.packed_rows import Layout

BLOCK = 128  # tokens; the size that torch's kernels are tuned for


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
    """Return which blocks of `BLOCK` tokens a layout computes, and which of these without a mask."""
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
