"""Attention over packed rows by flash kernels for CUDA: torch's own, or FlashAttention 3 or 4 where it is installed.

One variable-length call (`torch.nn.attention.varlen`) computes all nodes, and one more the links of every depth of the trees.
Parts are merged and differentiated as in `cpu_flash`, for which the operator beneath is called: the public function
differentiates each call by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from penstock.trainer.algorithm.packed_rows import Layout, Node
from penstock.trainer.attention_choice import MAX_FLASH_HEAD

_CAUSAL, _FULL = (-1, 0), (-1, -1)  # windows: tokens before and after that a query attends to; -1: all


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
    def __init__(self, name: str = "flash", implementation: str | None = None) -> None:
        """Take the name of a backend, and torch's name of an installed implementation; None: the one within torch."""
        self.name = name
        self._implementation = implementation

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        if query.device.type != "cuda":
            return f"it needs a GPU, and the model is on {query.device.type}"
        if query.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes bfloat16 and float16, and the model is {str(query.dtype).removeprefix('torch.')}"
        if not query.shape[-1] == value.shape[-1] <= MAX_FLASH_HEAD:
            return f"it computes heads of at most {MAX_FLASH_HEAD} dimensions, and these have {query.shape[-1]}"
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        _activate(self._implementation)
        rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # [T, H, D]
        out: Any = _Attention.apply(*rows, _parts(layout, query.device), scale)
        return out.transpose(0, 1)[None]


def _activate(implementation: str | None) -> None:
    """Let torch's flash attention run on an implementation of this process; None: its own."""
    if attention.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


class _Attention(torch.autograd.Function):
    """Forward and backward of all parts; tensors are [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[_Part], scale: float) -> Tensor:
        total, lse = torch.empty(0), torch.empty(0)
        for number, part in enumerate(parts):
            given = (_take(query, part.queries), _take(key, part.keys), _take(value, part.keys))
            out, out_lse = _kernel(*given, part, scale)
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
        ctx.parts, ctx.scale = parts, scale
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        dtype = torch.float32 if len(ctx.parts) > 1 else query.dtype
        into = [torch.zeros_like(held, dtype=dtype) for held in (query, key, value)]
        for part in ctx.parts:
            queries, keys = part.queries, part.keys
            given = (_take(grads[0].contiguous(), queries), _take(query, queries), _take(key, keys), _take(value, keys))
            own_lse = lse if queries is None else lse.index_select(1, queries)
            found = _kernel_backward(*given, _take(out, queries), own_lse, part, ctx.scale)
            for held, some, at in zip(into, found, (queries, keys, keys), strict=True):
                if at is None:
                    held += some
                else:
                    held.index_add_(0, at, some.to(dtype))
        return *(held.to(query.dtype) for held in into), None, None


def _kernel(query: Tensor, key: Tensor, value: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention [Q, H, D] and its log-sum-exp [H, Q] float32."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415  not in every torch; `backends` says so

    found: Any = varlen_attn(
        *(query, key, value, part.query_bounds, part.key_bounds, part.longest_query, part.longest_key),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=_CAUSAL if part.is_causal else _FULL,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found


def _kernel_backward(*given: Any) -> Any:
    """Return the gradients of queries, keys and values; given those of the output, these, the output and its log-sum-exp."""
    *tensors, part, scale = given
    bounds = (part.query_bounds, part.key_bounds, part.longest_query, part.longest_key)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)
    unused = torch.empty(0, device=tensors[0].device)
    left, right = _CAUSAL if part.is_causal else _FULL
    return torch.ops.aten._flash_attention_backward(
        *(*tensors, *bounds, 0.0, part.is_causal, no_dropout, unused),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


def _take(values: Tensor, at: Tensor | None) -> Tensor:
    return values.contiguous() if at is None else values.index_select(0, at)


def _parts(layout: Layout, device: torch.device) -> list[_Part]:
    if (known := layout.prepared.get(("flash", device))) is not None:
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
    layout.prepared["flash", device] = parts
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
