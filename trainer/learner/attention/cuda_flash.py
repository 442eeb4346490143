"""Attention over packed rows by flash kernels for CUDA, torch's or FlashAttention 3 or 4 where installed: memory linear in the tokens.

One variable-length call (`torch.nn.attention.varlen`) computes all nodes, and one more the links of every depth of the trees.
Parts are merged and differentiated as in `cpu_flash`, for which the operator beneath is called: the public function
differentiates each call by itself. With a sliding window, a call has the tokens of nodes, and for each node a copy of the keys in
their windows: the kernels align both at their ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.packed_rows import Band, Layout, Node
from penstock.trainer.attention_choice import MAX_FLASH_HEAD
from penstock.trainer.learner.attention.variant import PLAIN, Variant, gradient_of_sinks, share_beside_sinks

_CAUSAL, _FULL = (-1, 0), (-1, -1)  # windows: tokens before and after that a query attends to; -1: all
_TABLES = ("queries", "keys", "query_bounds", "key_bounds")  # of a part, which the device reads
_MOST_COPIES = 4  # keys of a call with windows, for each token of the stream


@dataclass(frozen=True, slots=True)
class _CudaPart:
    """One variable-length call; sequence n has the queries and keys between entries n and n + 1 of the bounds."""

    queries: Tensor | slice  # [Q] int64, positions in the stream; a slice: of tokens that no call before had
    keys: Tensor | slice  # [K] int64
    query_bounds: Tensor  # [S + 1] int32
    key_bounds: Tensor  # [S + 1] int32
    longest_query: int
    longest_key: int
    window: tuple[int, int]  # as _CAUSAL and _FULL


class CudaFlash:
    def __init__(self, name: str = "flash", implementation: str | None = None) -> None:
        """Take the name of a backend, and torch's name of an installed implementation; None: the one within torch."""
        self.name, self._implementation = name, implementation

    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        if query.device.type != "cuda":
            return f"it needs a GPU, and the model is on {query.device.type}"
        if query.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes bfloat16 and float16, and the model is {str(query.dtype).removeprefix('torch.')}"
        if not query.shape[-1] == value.shape[-1] <= MAX_FLASH_HEAD:
            return f"it computes heads of at most {MAX_FLASH_HEAD} dimensions, and these have {query.shape[-1]}"
        return "it does not cap scores" if variant.softcap is not None else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        _activate(self._implementation)
        rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # [T, H, D]
        parts = _cuda_parts(layout, query.device, variant.window)
        out: Any = _CudaAttention.apply(*rows, variant.sinks, parts, scale)
        return out.transpose(0, 1)[None]


def _activate(implementation: str | None) -> None:
    """Let torch's flash attention run on an implementation of this process; None: torch's implementation."""
    if attention.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


class _CudaAttention(torch.autograd.Function):
    """Forward and backward of all parts; tensors are [T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, parts: list[_CudaPart], scale: float
    ) -> Tensor:
        outs, links = [], list[_CudaPart]()
        for part in parts:
            if isinstance(part.queries, slice):
                outs.append(_cuda_kernel(*_taken(query, key, value, part), part, scale))
            else:
                links.append(part)
        total, lse = (
            outs[0] if len(outs) == 1 else (torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs], 1))
        )
        total = total.float() if links or sinks is not None else total  # lse: [H, T] float32
        for part in links:
            out, out_lse = _cuda_kernel(*_taken(query, key, value, part), part, scale)
            before, before_lse = total[part.queries], lse[:, part.queries]
            merged = torch.logaddexp(before_lse, out_lse)
            shares = [(some - merged).exp().transpose(0, 1).unsqueeze(-1) for some in (before_lse, out_lse)]
            total[part.queries] = before * shares[0] + out * shares[1]
            lse[:, part.queries] = merged
        if sinks is not None:
            total.mul_(share_beside_sinks(lse, sinks).transpose(0, 1).unsqueeze(-1))
            lse = torch.logaddexp(lse, sinks.float().unsqueeze(-1))
        total = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, total, lse, sinks)
        ctx.parts, ctx.scale = parts, scale
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        adds = any(isinstance(at, Tensor) for part in ctx.parts for at in (part.queries, part.keys))
        dtype = torch.float32 if adds else query.dtype
        into = [torch.zeros_like(held, dtype=dtype) for held in (query, key, value)]
        grad = grads[0].contiguous()
        for part in ctx.parts:
            tensors = (_take(grad, part.queries), *_taken(query, key, value, part), _take(out, part.queries))
            gradients = _cuda_kernel_backward(*tensors, lse[:, part.queries].contiguous(), part, ctx.scale)
            for held, some, at in zip(into, gradients, (part.queries, part.keys, part.keys), strict=True):
                if isinstance(at, slice):
                    held[at] += some
                else:
                    held.index_add_(0, at, some.to(dtype))
        by_heads = (grads[0].transpose(0, 1), out.transpose(0, 1), lse)
        of_sinks = None if sinks is None else gradient_of_sinks(*by_heads, sinks)
        return *(held.to(query.dtype) for held in into), of_sinks, None, None


def _cuda_kernel(query: Tensor, key: Tensor, value: Tensor, part: _CudaPart, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention [Q, H, D] and its log-sum-exp [H, Q] float32."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415  not in every torch; `backends` says so

    output_and_lse: Any = varlen_attn(
        *(query, key, value, part.query_bounds, part.key_bounds, part.longest_query, part.longest_key),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=part.window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output_and_lse


def _cuda_kernel_backward(*arguments: Any) -> Any:
    *tensors, part, scale = arguments
    bounds = (part.query_bounds, part.key_bounds, part.longest_query, part.longest_key)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)
    unused = torch.empty(0, device=tensors[0].device)
    return torch.ops.aten._flash_attention_backward(
        *(*tensors, *bounds, 0.0, part.window == _CAUSAL, no_dropout, unused),
        scale=scale,
        window_size_left=part.window[0],
        window_size_right=part.window[1],
    )


def _take(values: Tensor, at: Tensor | slice) -> Tensor:
    return values[at].contiguous() if isinstance(at, slice) else values.index_select(0, at)


def _taken(query: Tensor, key: Tensor, value: Tensor, part: _CudaPart) -> tuple[Tensor, Tensor, Tensor]:
    return _take(query, part.queries), _take(key, part.keys), _take(value, part.keys)


def _cuda_parts(layout: Layout, device: torch.device, window: int | None = None) -> list[_CudaPart]:
    known = layout.prepared.get(("flash", device, window))
    if known is None:
        known = _on_device(list(_parts_of(layout) if window is None else _windowed(layout, window)), device)
        layout.prepared["flash", device, window] = known
    return known


def _on_device(parts: list[_CudaPart], device: torch.device) -> list[_CudaPart]:
    tables = [{name: held for name in _TABLES if isinstance(held := getattr(part, name), Tensor)} for part in parts]
    copies = iter(copied_together([held for table in tables for held in table.values()], device))
    return [replace(part, **{name: next(copies) for name in table}) for part, table in zip(parts, tables, strict=True)]


def _parts_of(layout: Layout) -> Iterator[_CudaPart]:
    starts = np.array([node.start for node in layout.nodes] + [layout.num_tokens])
    longest = int(np.diff(starts).max())
    bounds = torch.from_numpy(starts).int()
    yield _CudaPart(slice(None), slice(None), bounds, bounds, longest, longest, _CAUSAL)
    for nodes in _links_by_level(layout):
        queries = [np.arange(node.end, node.subtree_end) for node in nodes]
        yield _part(queries, [np.arange(node.start, node.end) for node in nodes], _FULL)


def _windowed(layout: Layout, window: int) -> Iterator[_CudaPart]:
    """Yield calls of nodes with the keys in their windows, each with few copies of keys."""
    held: list[Band] = []
    copies = 0
    for band in [*layout.bands(window, layout.num_tokens), None]:
        if band is None or (held and copies + band.before > _MOST_COPIES * layout.num_tokens):
            queries = [np.arange(some.start, some.end) for some in held]
            keys = [np.concatenate([np.arange(*ends) for ends in some.keys]) for some in held]
            part = _part(queries, keys, (window - 1, 0))
            yield replace(part, queries=slice(held[0].start, held[-1].end))
            held, copies = [], 0
        if band is not None:
            held.append(band)
            copies += band.before


def _part(queries: list[np.ndarray], keys: list[np.ndarray], window: tuple[int, int]) -> _CudaPart:
    return _CudaPart(
        torch.from_numpy(np.concatenate(queries)),
        torch.from_numpy(np.concatenate(keys)),
        _bounds(queries),
        _bounds(keys),
        max(map(len, queries)),
        max(map(len, keys)),
        window,
    )


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
