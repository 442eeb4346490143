"""Attention over packed rows by torch's flash kernel for the CPU: exact, with memory linear in the tokens.

Each part of the attention (a node with itself, or the descendants of a node with it) is one kernel call. Parts of the
same queries are merged by their log-sum-exp. The backward pass calls the kernel's backward for each part with the
merged output and log-sum-exp, which makes its probabilities the true ones, so gradients of parts add up. Short nodes,
and small trees as a whole with a mask, are computed in batches of similar length.

With a sliding window, some tokens of a node and the keys in their windows are one call, with a mask. Sinks are merged as a
part without values. The kernel does not cap scores: `capped_scores` has its two functions for that.

The two kernels have private names in torch: `backends` compares them with the definition before their first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Band, Layout, Node
from penstock.trainer.learner.attention import capped_scores
from penstock.trainer.learner.attention.variant import PLAIN, Variant, gradient_of_sinks, share_beside_sinks

_SMALL_TREE = 256  # tokens; up to here one masked call costs less than the calls of its nodes
_SHORT_NODE = 96  # tokens; up to here nodes are computed together
_LEAST_FILL = 0.75  # shortest to longest sequence of a batch
_BATCH_TOKENS = 8192
_BAND_QUERIES = 128


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


_Bands = list[tuple[Band, Tensor | None]]  # with the mask [queries, keys], added to scores; None: causal


@dataclass(frozen=True, slots=True)
class _CpuParts:
    """The kernel calls of a layout: every token's query is in one batch, span or band, and in any number of links."""

    batches: list[_Batch]
    spans: list[tuple[int, int]]  # causal
    links: list[Node]
    bands: _Bands


class CpuFlash:
    name = "cpu-flash"

    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        del variant
        if query.device.type != "cpu":
            return f"it runs on the CPU, and the model is on {query.device.type}"
        if query.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            return (
                f"it computes bfloat16, float32 and float64, and the model is {str(query.dtype).removeprefix('torch.')}"
            )
        if query.shape[-1] != value.shape[-1]:
            return f"heads of values have {value.shape[-1]} dimensions, and those of queries {query.shape[-1]}"
        return None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        kernel = _Kernel(scale, variant.softcap)
        parts = _cpu_parts(layout, query.dtype, variant.window)
        return _CpuAttention.apply(query, key, value, variant.sinks, parts, kernel)  # type: ignore[return-value]


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, parts: _CpuParts, kernel: _Kernel
    ) -> Tensor:
        out = _token_major(query, _wide(query.dtype, bool(parts.links) or sinks is not None))
        lse = _token_major(query[..., 0], _wide(query.dtype))
        for batch in parts.batches:
            tensors = (batch.gather(query), batch.gather(key), batch.gather(value))
            some, some_lse = kernel.forward(*tensors, batch.mask is None, batch.mask)
            batch.scatter(out, some)
            batch.scatter(lse, some_lse)
        for start, end in parts.spans:
            here = slice(start, end)
            out[:, :, here], lse[:, :, here] = kernel.forward(
                query[:, :, here], key[:, :, here], value[:, :, here], True
            )
        for band, mask in parts.bands:
            here, keys, values = slice(band.start, band.end), _columns(key, band), _columns(value, band)
            out[:, :, here], lse[:, :, here] = kernel.forward(query[:, :, here], keys, values, mask is None, mask)
        for link in parts.links:
            below, above = slice(link.end, link.subtree_end), slice(link.start, link.end)
            some, some_lse = kernel.forward(query[:, :, below], key[:, :, above], value[:, :, above], False)
            _merge(out[:, :, below], lse[:, :, below], some, some_lse)
        if sinks is not None:
            out.mul_(share_beside_sinks(lse, sinks).unsqueeze(-1))
            lse = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.parts, ctx.kernel = parts, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        parts, kernel, grad = ctx.parts, ctx.kernel, grads[0]
        into = [_token_major(held, _wide(held.dtype, bool(parts.links or parts.bands))) for held in (query, key, value)]
        for batch in parts.batches:
            tensors = list(map(batch.gather, (grad, query, key, value, out, lse)))
            for held, gradient in zip(into, kernel.backward(tensors, batch.mask is None, batch.mask), strict=True):
                batch.scatter(held, gradient)
        for start, end in parts.spans:
            tensors = [held[:, :, start:end] for held in (grad, query, key, value, out, lse)]
            for held, gradient in zip(into, kernel.backward(tensors, True), strict=True):
                held[:, :, start:end] = gradient
        _backward_of_bands(kernel, parts.bands, (grad, query, key, value, out, lse), into)
        for link in parts.links:
            below, above = slice(link.end, link.subtree_end), slice(link.start, link.end)
            where = (below, below, above, above, below, below)
            tensors = [h[:, :, at] for h, at in zip((grad, query, key, value, out, lse), where, strict=True)]
            gradients = kernel.backward(tensors, False)
            for held, at, some in zip(into, (below, above, above), gradients, strict=True):
                held[:, :, at] += some
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return *(held.to(query.dtype) for held in into), of_sinks, None, None


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Attention [B, H, Q, D] with its log-sum-exp [B, H, Q], and their gradients from both; masks are added to scores."""

    scale: float
    softcap: float | None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.softcap is not None:
            return capped_scores.forward(query, key, value, self.scale, self.softcap, is_causal, mask)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=self.scale)

    def backward(self, tensors: Sequence[Tensor], is_causal: bool, mask: Tensor | None = None) -> Any:
        """Return the gradients of query, key and value from those of the output, them, output and log-sum-exp."""
        if self.softcap is not None:
            return capped_scores.backward(tensors, self.scale, self.softcap, is_causal, mask)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(*tensors, 0.0, is_causal, attn_mask=mask, scale=self.scale)


def _backward_of_bands(kernel: _Kernel, bands: _Bands, tensors: Sequence[Tensor], into: list[Tensor]) -> None:
    grad, query, key, value, out, lse = tensors
    for band, _ in bands:  # keys are in several
        for held in into[1:]:
            held[:, :, band.start : band.end] = 0
    for band, mask in bands:
        here = slice(band.start, band.end)
        gradient, *of_keys = kernel.backward(
            [
                *(grad[:, :, here], query[:, :, here], _columns(key, band), _columns(value, band)),
                *(out[:, :, here], lse[:, :, here]),
            ],
            mask is None,
            mask,
        )
        into[0][:, :, here] = gradient
        for held, some in zip(into[1:], of_keys, strict=True):
            _add_columns(held, some, band)


def _columns(values: Tensor, band: Band) -> Tensor:
    """Return the keys or values [1, K, before + queries, D] of a band."""
    parts = [values[:, :, start:end] for start, end in band.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _add_columns(into: Tensor, gradient: Tensor, band: Band) -> None:
    at = 0
    for start, end in band.keys:
        into[:, :, start:end] += gradient[:, :, at : at + end - start]
        at += end - start


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add keys to an attention in place: weight both outputs by their shares of the sum of exponentials."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(other * (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _wide(dtype: torch.dtype, are_added: bool = True) -> torch.dtype:
    """Return the dtype in which parts of the same token are added: at least float32."""
    return torch.promote_types(dtype, torch.float32) if are_added else dtype


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for [1, H, T, …] that is contiguous as [T, H, …], as the models' next layer reads it."""
    _, heads, tokens, *size = like.shape
    return like.new_empty(1, tokens, heads, *size, dtype=dtype).transpose(1, 2)


def _cpu_parts(layout: Layout, dtype: torch.dtype, window: int | None = None) -> _CpuParts:
    known = layout.prepared.get((CpuFlash.name, dtype, window))
    if known is None:
        known = layout.prepared[CpuFlash.name, dtype, window] = _parts_of(layout, dtype, window)
    return known


def _parts_of(layout: Layout, dtype: torch.dtype, window: int | None) -> _CpuParts:
    small: list[list[Node]] = []
    short: list[Node] = []
    large: list[Node] = []
    parts = _CpuParts([], [], [], [])
    for tree in layout.trees():
        if (len(tree) > 1 or window is not None) and tree[0].subtree_end - tree[0].start <= _SMALL_TREE:
            small.append(tree)
            continue
        large += tree
        for node in tree if window is None else ():
            if node.end - node.start <= _SHORT_NODE:
                short.append(node)
            else:
                parts.spans.append((node.start, node.end))
            if node.subtree_end > node.end:
                parts.links.append(node)
    parts.batches.extend(_batch(some, None) for some in _alike([(n.start, n.end) for n in short]))
    masks = {tree[0].start: _mask(layout, tree, window) for tree in small}
    for some in _alike([(tree[0].start, tree[0].subtree_end) for tree in small]):
        longest = some[0][1] - some[0][0]
        allowed = np.broadcast_to(np.eye(longest, dtype=np.bool_), (len(some), longest, longest)).copy()
        for number, (start, end) in enumerate(some):
            allowed[number, : end - start, : end - start] = masks[start]
        parts.batches.append(_batch(some, _bias(allowed[:, None], dtype)))
    if window is not None:
        parts.bands.extend(_bands(Layout(tuple(large), layout.depths), dtype, window))
    return parts


def _bands(layout: Layout, dtype: torch.dtype, window: int) -> Iterator[tuple[Band, Tensor | None]]:
    """Yield bands with their masks, all of which are parts of one matrix."""
    widest = min(window, layout.longest_row) - 1
    distances = widest + np.arange(_BAND_QUERIES)[:, None] - np.arange(widest + _BAND_QUERIES)
    whole = _bias((distances >= 0) & (distances < window), dtype)
    for band in layout.bands(window, _BAND_QUERIES):
        num = band.end - band.start
        is_plain = band.before == 0 and num <= window
        yield band, None if is_plain else whole[:num, widest - band.before : widest + num]


def _bias(allowed: npt.NDArray[np.bool_], dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~torch.from_numpy(allowed), float("-inf"))


def _mask(layout: Layout, tree: Sequence[Node], window: int | None) -> npt.NDArray[np.bool_]:
    first, end = tree[0].start, tree[0].subtree_end
    moved = tuple(Node(node.start - first, node.end - first, node.subtree_end - first) for node in tree)
    return Layout(moved, layout.depths[first:end]).mask(window)


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
