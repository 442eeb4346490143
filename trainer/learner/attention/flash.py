"""Attention over packed rows by flash kernels: exact, with memory linear in the tokens.

On the CPU each part of the attention (a node with itself, or the descendants of a node with it) is one kernel call. Parts of the
same queries are merged by their log-sum-exp. The backward pass calls the kernel's backward for each part with the
merged output and log-sum-exp, which makes its probabilities the true ones, so gradients of parts add up. Short nodes,
and small trees as a whole with a mask, are computed in batches of similar length.

The two kernels have private names in torch: `backends` compares them with the definition before their first use.

The kernels for CUDA are torch's own, or FlashAttention 3 or 4 where it is installed. One variable-length call (`torch.nn.attention.varlen`) computes all nodes, and one more the links of every depth of the trees.
Parts are merged and differentiated as on the CPU, for which the operator beneath is called: the public function
differentiates each call by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.packed_rows import Layout, Node
from penstock.trainer.attention_choice import MAX_FLASH_HEAD

_SMALL_TREE = 256  # tokens; up to here one masked call costs less than the calls of its nodes
_SHORT_NODE = 96  # tokens; up to here nodes are computed together
_LEAST_FILL = 0.75  # shortest to longest sequence of a batch
_BATCH_TOKENS = 8192

_CAUSAL, _FULL = (-1, 0), (-1, -1)  # windows: tokens before and after that a query attends to; -1: all


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of similar length as [B, L], each attending within itself."""

    tokens: Tensor  # [n] int64, positions in the stream
    places: Tensor | None  # [n] int64, positions in [B * L]; None: 0, 1, 2, …
    shape: tuple[int, int]
    mask: Tensor | None  # [B, 1, L, L], added to scores; None: causal

    def gather(self, values: Tensor) -> Tensor:
        """Return values [1, H, T, …] as [B, H, L, …], with 0 for padding."""
        rows = values[0].transpose(0, 1).index_select(0, self.tokens)
        if self.places is not None:
            padded = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows)
        return rows.unflatten(0, self.shape).transpose(1, 2)

    def scatter(self, into: Tensor, values: Tensor) -> None:
        """Write values [B, H, L, …] to their tokens in [1, H, T, …]."""
        rows = values.transpose(1, 2).flatten(0, 1)
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        into[0].transpose(0, 1).index_copy_(0, self.tokens, rows.to(into.dtype))


@dataclass(frozen=True, slots=True)
class _CpuParts:
    """The kernel calls of a layout: every token's query is in one batch or one of the spans, and in any number of links."""

    batches: list[_Batch]
    spans: list[tuple[int, int]]  # causal
    links: list[Node]


class CpuFlash:
    name = "cpu-flash"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        if query.device.type != "cpu":
            return f"it runs on the CPU, and the model is on {query.device.type}"
        if query.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            return (
                f"it computes bfloat16, float32 and float64, and the model is {str(query.dtype).removeprefix('torch.')}"
            )
        if query.shape[-1] != value.shape[-1]:
            return f"heads of values have {value.shape[-1]} dimensions, and those of queries {query.shape[-1]}"
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        return _CpuAttention.apply(query, key, value, _cpu_parts(layout, query.dtype), scale)  # type: ignore[return-value]


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: _CpuParts, scale: float) -> Tensor:
        out, lse = _token_major(query, _wide(parts, query)), None
        for batch in parts.batches:
            tensors = (batch.gather(query), batch.gather(key), batch.gather(value))
            some, some_lse = _cpu_kernel(*tensors, scale, batch.mask is None, batch.mask)
            lse = _like_lse(query, some_lse) if lse is None else lse
            batch.scatter(out, some)
            batch.scatter(lse, some_lse)
        for start, end in parts.spans:
            here = slice(start, end)
            some, some_lse = _cpu_kernel(query[:, :, here], key[:, :, here], value[:, :, here], scale, True)
            lse = _like_lse(query, some_lse) if lse is None else lse
            out[:, :, here], lse[:, :, here] = some, some_lse
        assert lse is not None
        for link in parts.links:
            below, above = slice(link.end, link.subtree_end), slice(link.start, link.end)
            some, some_lse = _cpu_kernel(query[:, :, below], key[:, :, above], value[:, :, above], scale, False)
            _merge(out[:, :, below], lse[:, :, below], some, some_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        parts, scale, grad = ctx.parts, ctx.scale, grads[0]
        into = [_token_major(held, _wide(parts, held)) for held in (query, key, value)]
        for batch in parts.batches:
            tensors = list(map(batch.gather, (grad, query, key, value, out, lse)))
            for held, gradient in zip(
                into, _cpu_kernel_backward(tensors, scale, batch.mask is None, batch.mask), strict=True
            ):
                batch.scatter(held, gradient)
        for start, end in parts.spans:
            tensors = [held[:, :, start:end] for held in (grad, query, key, value, out, lse)]
            for held, gradient in zip(into, _cpu_kernel_backward(tensors, scale, True), strict=True):
                held[:, :, start:end] = gradient
        for link in parts.links:
            below, above = slice(link.end, link.subtree_end), slice(link.start, link.end)
            where = (below, below, above, above, below, below)
            tensors = [h[:, :, at] for h, at in zip((grad, query, key, value, out, lse), where, strict=True)]
            gradient = _cpu_kernel_backward(tensors, scale, False)
            for held, at, some in zip(into, (below, above, above), gradient, strict=True):
                held[:, :, at] += some
        return *(held.to(query.dtype) for held in into), None, None


def _cpu_kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)


def _cpu_kernel_backward(tensors: Sequence[Tensor], scale: float, is_causal: bool, mask: Tensor | None = None) -> Any:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(*tensors, 0.0, is_causal, attn_mask=mask, scale=scale)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add keys to an attention in place: weight both outputs by their shares of the sum of exponentials."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(other * (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wide(parts: _CpuParts, like: Tensor) -> torch.dtype:
    """Return the dtype in which parts of the same token are added: at least float32."""
    return torch.promote_types(like.dtype, torch.float32) if parts.links else like.dtype


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for [1, H, T, D] that is contiguous as [T, H, D], as the models' next layer reads it."""
    _, heads, tokens, size = like.shape
    return like.new_empty(1, tokens, heads, size, dtype=dtype).transpose(1, 2)


def _like_lse(query: Tensor, lse: Tensor) -> Tensor:
    return lse.new_empty(1, query.shape[2], query.shape[1]).transpose(1, 2)


def _cpu_parts(layout: Layout, dtype: torch.dtype) -> _CpuParts:
    if (known := layout.prepared.get((CpuFlash.name, dtype))) is not None:
        return known
    small: list[list[Node]] = []
    short: list[Node] = []
    parts = _CpuParts([], [], [])
    for tree in layout.trees():
        if len(tree) > 1 and tree[0].subtree_end - tree[0].start <= _SMALL_TREE:
            small.append(tree)
            continue
        for node in tree:
            if node.end - node.start <= _SHORT_NODE:
                short.append(node)
            else:
                parts.spans.append((node.start, node.end))
            if node.subtree_end > node.end:
                parts.links.append(node)
    parts.batches.extend(_batch(some, None) for some in _alike([(n.start, n.end) for n in short]))
    masks = {tree[0].start: _mask(tree) for tree in small}
    for some in _alike([(tree[0].start, tree[0].subtree_end) for tree in small]):
        longest = some[0][1] - some[0][0]
        allowed = np.broadcast_to(np.eye(longest, dtype=np.bool_), (len(some), longest, longest)).copy()
        for number, (start, end) in enumerate(some):
            allowed[number, : end - start, : end - start] = masks[start]
        bias = torch.zeros(len(some), 1, longest, longest, dtype=dtype)
        parts.batches.append(_batch(some, bias.masked_fill_(~torch.from_numpy(allowed)[:, None], float("-inf"))))
    layout.prepared[CpuFlash.name, dtype] = parts
    return parts


def _mask(tree: Sequence[Node]) -> np.ndarray:
    first = tree[0].start
    moved = tuple(Node(node.start - first, node.end - first, node.subtree_end - first) for node in tree)
    return Layout(moved, np.empty(0, np.int64)).mask()


def _alike(ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    batches: list[list[tuple[int, int]]] = []
    for some in sorted(ranges, key=lambda r: (r[0] - r[1], r)):
        longest = batches[-1][0][1] - batches[-1][0][0] if batches else 0
        fits = (
            batches and some[1] - some[0] >= _LEAST_FILL * longest and (len(batches[-1]) + 1) * longest <= _BATCH_TOKENS
        )
        if fits:
            batches[-1].append(some)
        else:
            batches.append([some])
    return batches


def _batch(ranges: Sequence[tuple[int, int]], mask: Tensor | None) -> _Batch:
    longest = ranges[0][1] - ranges[0][0]
    tokens = np.concatenate([np.arange(start, end) for start, end in ranges])
    places = np.concatenate([n * longest + np.arange(end - start) for n, (start, end) in enumerate(ranges)])
    is_full = len(tokens) == len(ranges) * longest
    where = None if is_full else torch.from_numpy(places)
    return _Batch(torch.from_numpy(tokens), where, (len(ranges), longest), mask)


@dataclass(frozen=True, slots=True)
class _CudaPart:
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
        self.name, self._implementation = name, implementation

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
        out: Any = _CudaAttention.apply(*rows, _cuda_parts(layout, query.device), scale)
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
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[_CudaPart], scale: float) -> Tensor:
        total, lse = torch.empty(0), torch.empty(0)
        for number, part in enumerate(parts):
            tensors = (_take(query, part.queries), _take(key, part.keys), _take(value, part.keys))
            out, out_lse = _cuda_kernel(*tensors, part, scale)
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
            tensors = (
                _take(grads[0].contiguous(), queries),
                _take(query, queries),
                _take(key, keys),
                _take(value, keys),
            )
            own_lse = lse if queries is None else lse.index_select(1, queries)
            gradients = _cuda_kernel_backward(*tensors, _take(out, queries), own_lse, part, ctx.scale)
            for held, some, at in zip(into, gradients, (queries, keys, keys), strict=True):
                if at is None:
                    held += some
                else:
                    held.index_add_(0, at, some.to(dtype))
        return *(held.to(query.dtype) for held in into), None, None


def _cuda_kernel(query: Tensor, key: Tensor, value: Tensor, part: _CudaPart, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention [Q, H, D] and its log-sum-exp [H, Q] float32."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415  not in every torch; `backends` says so

    output_and_lse: Any = varlen_attn(
        *(query, key, value, part.query_bounds, part.key_bounds, part.longest_query, part.longest_key),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=_CAUSAL if part.is_causal else _FULL,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output_and_lse


def _cuda_kernel_backward(*arguments: Any) -> Any:
    *tensors, part, scale = arguments
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


def _cuda_parts(layout: Layout, device: torch.device) -> list[_CudaPart]:
    if (known := layout.prepared.get(("flash", device))) is not None:
        return known
    starts = np.array([node.start for node in layout.nodes] + [layout.num_tokens])
    links = [
        ([np.arange(node.end, node.subtree_end) for node in nodes], [np.arange(node.start, node.end) for node in nodes])
        for nodes in _links_by_level(layout)
    ]
    tables = [torch.from_numpy(starts).int()]
    for link in links:
        tables += [*(torch.from_numpy(np.concatenate(some)) for some in link), *map(_bounds, link)]
    bounds, *rest = copied_together(tables, device)
    longest = int(np.diff(starts).max())
    parts = [_CudaPart(None, None, bounds, bounds, longest, longest, True)]
    for number, (queries, keys) in enumerate(links):
        at, keys_at, query_bounds, key_bounds = rest[4 * number : 4 * number + 4]
        longest_query, longest_key = max(map(len, queries)), max(map(len, keys))
        parts.append(_CudaPart(at, keys_at, query_bounds, key_bounds, longest_query, longest_key, False))
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
