"""Attention with capped scores, c tanh(s / c), for which torch's kernels for the CPU have no argument, and its gradients.

Some queries at a time, so that memory grows with the keys. All is computed in float32 at least, from the log-sum-exp in the backward
pass, as in flash attention (arXiv:2307.08691, algorithm 2).

Shapes: queries and outputs [B, H, Q, D], keys and values [B, K, N, D], log-sum-exp [B, H, Q]; K divides H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_QUERIES = 128


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores; ``mask`` [..., Q, N] is added to them."""
    heads, kv_heads = query.shape[1], key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)
    for rows, columns, bias in _blocks(query, key, is_causal, mask):
        queries = _grouped(query[:, :, rows].to(wide), kv_heads)
        scores = _masked(_tanh(queries, key[:, :, columns].to(wide), scale, softcap) * softcap, bias, heads)
        some_lse = scores.logsumexp(-1, keepdim=True)
        some = (scores - some_lse).exp_() @ value[:, :, columns].to(wide)
        out[:, :, rows], lse[:, :, rows] = _by_heads(some, heads).to(out.dtype), _by_heads(some_lse, heads).squeeze(-1)
    return out, lse


def backward(
    tensors: Sequence[Tensor], scale: float, softcap: float, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; ``tensors`` are that of the output, they, the output and its log-sum-exp."""
    grad, query, key, value, out, lse = tensors
    heads, kv_heads = query.shape[1], key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(held, dtype=wide) for held in (key, value))
    deltas = (grad.to(wide) * out.to(wide)).sum(-1)
    for rows, columns, bias in _blocks(query, key, is_causal, mask):
        keys, values = key[:, :, columns].to(wide), value[:, :, columns].to(wide)
        queries, upstream = (_grouped(held[:, :, rows].to(wide), kv_heads) for held in (query, grad))
        some_lse, delta = (_grouped(held[:, :, rows, None], kv_heads) for held in (lse, deltas))
        tanh = _tanh(queries, keys, scale, softcap)
        weights = (_masked(tanh * softcap, bias, heads) - some_lse).exp_()
        of_value[:, :, columns] += weights.transpose(-1, -2) @ upstream
        of_scores = weights.mul_(upstream @ values.transpose(-1, -2) - delta).mul_(1 - tanh * tanh).mul_(scale)
        of_query[:, :, rows] = _by_heads(of_scores @ keys, heads).to(query.dtype)
        of_key[:, :, columns] += of_scores.transpose(-1, -2) @ queries
    return of_query, of_key, of_value


def _blocks(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries, the keys before their last, and what is added to their scores."""
    for start in range(0, query.shape[2], _QUERIES):
        end = min(start + _QUERIES, query.shape[2])
        if is_causal:
            bias = torch.full((end - start, end), float("-inf"), device=query.device).triu_(start + 1)
            yield slice(start, end), slice(end), bias
        else:
            yield slice(start, end), slice(key.shape[2]), None if mask is None else mask[..., start:end, :]


def _tanh(queries: Tensor, keys: Tensor, scale: float, softcap: float) -> Tensor:
    return (queries @ keys.transpose(-1, -2)).mul_(scale / softcap).tanh_()


def _masked(scores: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    if bias is None:
        return scores
    batch, kv_heads, _, columns = scores.shape
    return scores.view(batch, heads, -1, columns).add_(bias).view(batch, kv_heads, -1, columns)


def _grouped(states: Tensor, kv_heads: int) -> Tensor:
    """Return states [B, H, Q, D] as [B, K, H / K · Q, D]: no key is copied."""
    return states.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _by_heads(states: Tensor, heads: int) -> Tensor:
    batch, kv_heads, _, size = states.shape
    return states.reshape(batch, kv_heads, heads // kv_heads, -1, size).flatten(1, 2)
