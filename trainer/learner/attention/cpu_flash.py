"""Attention over packed rows by torch's flash kernel for the CPU: exact, with memory linear in the tokens.

Each part of the attention (a node with itself, or the descendants of a node with it) is one kernel call. Parts of the
same queries are merged by their log-sum-exp. The backward pass calls the kernel's backward for each part with the
merged output and log-sum-exp, which makes its probabilities the true ones, so gradients of parts add up. Short nodes,
and small trees as a whole with a mask, are computed in batches of similar length.

The two kernels have private names in torch: `backends` compares them with the definition before their first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Layout, Node

_SMALL_TREE = 256  # tokens; up to here one masked call costs less than the calls of its nodes
_SHORT_NODE = 96  # tokens; up to here nodes are computed together
_LEAST_FILL = 0.75  # shortest to longest sequence of a batch
_BATCH_TOKENS = 8192


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
class _Parts:
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
        return _Attention.apply(query, key, value, _parts(layout, query.dtype), scale)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: _Parts, scale: float) -> Tensor:
        out, lse = _token_major(query, _wide(parts, query)), None
        for batch in parts.batches:
            given = (batch.gather(query), batch.gather(key), batch.gather(value))
            some, some_lse = _kernel(*given, scale, batch.mask is None, batch.mask)
            lse = _like_lse(query, some_lse) if lse is None else lse
            batch.scatter(out, some)
            batch.scatter(lse, some_lse)
        for start, end in parts.spans:
            here = slice(start, end)
            some, some_lse = _kernel(query[:, :, here], key[:, :, here], value[:, :, here], scale, True)
            lse = _like_lse(query, some_lse) if lse is None else lse
            out[:, :, here], lse[:, :, here] = some, some_lse
        assert lse is not None
        for link in parts.links:
            below, above = slice(link.end, link.subtree_end), slice(link.start, link.end)
            some, some_lse = _kernel(query[:, :, below], key[:, :, above], value[:, :, above], scale, False)
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
            given = list(map(batch.gather, (grad, query, key, value, out, lse)))
            for held, found in zip(into, _kernel_backward(given, scale, batch.mask is None, batch.mask), strict=True):
                batch.scatter(held, found)
        for start, end in parts.spans:
            given = [held[:, :, start:end] for held in (grad, query, key, value, out, lse)]
            for held, found in zip(into, _kernel_backward(given, scale, True), strict=True):
                held[:, :, start:end] = found
        for link in parts.links:
            below, above = slice(link.end, link.subtree_end), slice(link.start, link.end)
            where = (below, below, above, above, below, below)
            given = [h[:, :, at] for h, at in zip((grad, query, key, value, out, lse), where, strict=True)]
            found = _kernel_backward(given, scale, False)
            for held, at, some in zip(into, (below, above, above), found, strict=True):
                held[:, :, at] += some
        return *(held.to(query.dtype) for held in into), None, None


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)


def _kernel_backward(given: Sequence[Tensor], scale: float, is_causal: bool, mask: Tensor | None = None) -> Any:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(*given, 0.0, is_causal, attn_mask=mask, scale=scale)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add keys to an attention in place: weight both outputs by their shares of the sum of exponentials."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(other * (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wide(parts: _Parts, like: Tensor) -> torch.dtype:
    """Return the dtype in which parts of the same token are added: at least float32."""
    return torch.promote_types(like.dtype, torch.float32) if parts.links else like.dtype


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for [1, H, T, D] that is contiguous as [T, H, D], as the models' next layer reads it."""
    _, heads, tokens, size = like.shape
    return like.new_empty(1, tokens, heads, size, dtype=dtype).transpose(1, 2)


def _like_lse(query: Tensor, lse: Tensor) -> Tensor:
    return lse.new_empty(1, query.shape[2], query.shape[1]).transpose(1, 2)


def _parts(layout: Layout, dtype: torch.dtype) -> _Parts:
    """Choose the kernel calls of a layout, once per micro-batch."""
    if (known := layout.prepared.get((CpuFlash.name, dtype))) is not None:
        return known
    small: list[list[Node]] = []
    short: list[Node] = []
    parts = _Parts([], [], [])
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
    found: list[list[tuple[int, int]]] = []
    for some in sorted(ranges, key=lambda r: (r[0] - r[1], r)):
        longest = found[-1][0][1] - found[-1][0][0] if found else 0
        fits = found and some[1] - some[0] >= _LEAST_FILL * longest and (len(found[-1]) + 1) * longest <= _BATCH_TOKENS
        if fits:
            found[-1].append(some)
        else:
            found.append([some])
    return found


def _batch(ranges: Sequence[tuple[int, int]], mask: Tensor | None) -> _Batch:
    longest = ranges[0][1] - ranges[0][0]
    tokens = np.concatenate([np.arange(start, end) for start, end in ranges])
    places = np.concatenate([n * longest + np.arange(end - start) for n, (start, end) in enumerate(ranges)])
    is_full = len(tokens) == len(ranges) * longest
    where = None if is_full else torch.from_numpy(places)
    return _Batch(torch.from_numpy(tokens), where, (len(ranges), longest), mask)
