"""Attention over packed rows by the flash kernels that torch contains for CUDA: bfloat16 and float16, heads up to 256.

One variable-length call computes all nodes, and one more the links of every depth of the trees. Parts are merged and
differentiated as in `cpu_flash`. Needs no package besides torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Layout, Node

_MAX_HEAD = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """One variable-length call; sequence n has the queries and keys between entries n and n + 1 of the bounds."""

    queries: Tensor | None  # [Q] int64, positions in the stream; None: all
    keys: Tensor | None  # [K] int64
    query_bounds: Tensor  # [S + 1] int32
    key_bounds: Tensor  # [S + 1] int32
    longest_query: int
    longest_key: int
    is_causal: bool


class CudaFlash:
    """Torch's flash kernels for CUDA."""

    name = "cuda-flash"

    def supports(self, query: Tensor, value: Tensor) -> bool:
        """Return True on a GPU, for dtypes and head sizes of the kernels."""
        fits = query.shape[-1] == value.shape[-1] <= _MAX_HEAD
        return query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16) and fits

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """Return attention [1, H, T, D]; see `backends.Backend`."""
        rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # [T, H, D]
        out: Any = _Attention.apply(*rows, _parts(layout, query.device), scale)
        return out.transpose(0, 1)[None]


class _Attention(torch.autograd.Function):
    """Forward and backward of all parts; tensors are [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[_Part], scale: float) -> Tensor:
        states = []
        total, lse = torch.empty(0), torch.empty(0)
        for number, part in enumerate(parts):
            given = (_take(query, part.queries), _take(key, part.keys), _take(value, part.keys))
            bounds = (part.query_bounds, part.key_bounds, part.longest_query, part.longest_key)
            out, out_lse, *state, _ = _kernel(*given, *bounds, 0.0, part.is_causal, False, scale=scale)
            states.append(state)
            if number == 0:
                total, lse = (out.float() if len(parts) > 1 else out), out_lse  # lse: [H, T] float32
                continue
            assert part.queries is not None
            before, before_lse = total.index_select(0, part.queries), lse.index_select(1, part.queries)
            merged = torch.logaddexp(before_lse, out_lse)
            shares = [(some - merged).exp().transpose(0, 1).unsqueeze(-1) for some in (before_lse, out_lse)]
            total.index_copy_(0, part.queries, before * shares[0] + out * shares[1])
            lse.index_copy_(1, part.queries, merged)
        total = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, total, lse)
        ctx.parts, ctx.scale, ctx.states = parts, scale, states
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        dtype = torch.float32 if len(ctx.parts) > 1 else query.dtype
        into = [torch.zeros_like(held, dtype=dtype) for held in (query, key, value)]
        for part, state in zip(ctx.parts, ctx.states, strict=True):
            queries, keys = part.queries, part.keys
            given = (_take(grads[0].contiguous(), queries), _take(query, queries), _take(key, keys), _take(value, keys))
            own_lse = lse if queries is None else lse.index_select(1, queries)
            bounds = (part.query_bounds, part.key_bounds, part.longest_query, part.longest_key)
            found = _kernel_backward(
                *given, _take(out, queries), own_lse, *bounds, 0.0, part.is_causal, *state, scale=ctx.scale
            )
            for held, some, at in zip(into, found, (queries, keys, keys), strict=True):
                if at is None:
                    held += some
                else:
                    held.index_add_(0, at, some.to(dtype))
        return *(held.to(query.dtype) for held in into), None, None


def _kernel(*given: Any, scale: float) -> Any:
    return torch.ops.aten._flash_attention_forward(*given, scale=scale)


def _kernel_backward(*given: Any, scale: float) -> Any:
    return torch.ops.aten._flash_attention_backward(*given, scale=scale)


def _take(values: Tensor, at: Tensor | None) -> Tensor:
    return values.contiguous() if at is None else values.index_select(0, at)


def _parts(layout: Layout, device: torch.device) -> list[_Part]:
    if (known := layout.prepared.get((CudaFlash.name, device))) is not None:
        return known
    starts = np.array([node.start for node in layout.nodes] + [layout.num_tokens])
    longest = int(np.diff(starts).max())
    bounds = torch.from_numpy(starts).int().to(device)
    parts = [_Part(None, None, bounds, bounds, longest, longest, True)]
    for nodes in _links_by_level(layout):
        queries = [np.arange(node.end, node.subtree_end) for node in nodes]
        keys = [np.arange(node.start, node.end) for node in nodes]
        parts.append(
            _Part(
                torch.from_numpy(np.concatenate(queries)).to(device),
                torch.from_numpy(np.concatenate(keys)).to(device),
                _bounds(queries).to(device),
                _bounds(keys).to(device),
                max(map(len, queries)),
                max(map(len, keys)),
                False,
            )
        )
    layout.prepared[CudaFlash.name, device] = parts
    return parts


def _bounds(sequences: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *map(len, sequences)])).int()


def _links_by_level(layout: Layout) -> list[list[Node]]:
    """Return the inner nodes by their number of ancestors; the descendants of one level's nodes are disjoint."""
    levels: list[list[Node]] = []
    ends: list[int] = []
    for node in layout.nodes:
        while ends and ends[-1] <= node.start:
            ends.pop()
        if node.subtree_end > node.end:
            if len(ends) == len(levels):
                levels.append([])
            levels[len(ends)].append(node)
            ends.append(node.subtree_end)
    return levels
