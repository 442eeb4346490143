"""The forward pass of Llama, Qwen2, Qwen3 and Qwen3-MoE decoders in plain torch, for prompts and for one step.

Qwen2.5-VL has the decoder of Qwen2: image tokens have features in place of embeddings, and every token has three positions.

Differs from transformers in layout only:

1. q, k and v are one matrix, and so are gate and up: fewer, larger products.
2. Rows of q and k are reordered so that the two dimensions which rotary embedding mixes are adjacent; the
   rotation is then one complex product. Attention scores do not change: q and k are reordered alike.
3. On a CPU the matrices are packed once for oneDNN, which multiplies about twice as fast as the default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.low_rank import RowAdapters, Site
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig, Rope
from penstock.rollout_service.embedded_engine.model.vision_tower import VisionTower
from penstock.rollout_service.embedded_engine.model.weights import Experts, Layer, Linear, Weights

_QUERIES_AT_ONCE = 512  # a mask has so many rows, and a column for each known token

Change = Callable[[Site, torch.Tensor, torch.Tensor], None]  # adds an adapter's update to a product, in place


class PromptSpan(NamedTuple):
    num: int
    start: int  # tokens of each whose keys and values the cache rows hold already
    length: int  # tokens of each that are computed, behind these


@dataclass(frozen=True, slots=True)
class ImageTokens:
    rows: torch.Tensor  # [M] int64, their places
    features: torch.Tensor  # [M, hidden], in place of their embeddings


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts packed one after the other; neighbours of equal length share one attention call.

    Their keys and values go to consecutive cache rows from ``first_row`` on, ``copies`` rows for each prompt.
    """

    token_ids: torch.Tensor  # [N] int64; tokens beyond the last span are padding, computed and discarded
    positions: torch.Tensor  # [N] int64; [N, 3] of time, height and width where prompts have images
    spans: Sequence[PromptSpan]
    copies: Sequence[int]  # per prompt: how many cache rows receive it
    first_row: int
    images: ImageTokens | None = None


class Transformer:
    """The forward pass, with the weights of each call; owns only tables that no checkpoint holds."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._rotations = rotary_table(config.rope, config.head_dim, config.context_tokens).to(device)
        self._tower = None if config.vision is None else VisionTower(config.vision, device=device)
        self._axes = None if config.vision is None else torch.tensor(config.vision.rope_axes, device=device)
        self._frequencies = torch.arange(config.head_dim // 2, device=device)
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._scale = 1.0 / math.sqrt(config.head_dim)
        # For one query on a CPU, two small batched products are faster than the fused kernel. It is used elsewhere, and in
        # half precision, where scores must stay float32.
        self._by_products = device.type == "cpu" and dtype == torch.float32

    def features(self, weights: Weights, pixel_values: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        assert self._tower is not None  # requests with images are refused for other models
        return self._tower.features(weights.tower, pixel_values, grid)

    def prefill(
        self, weights: Weights, batch: PromptBatch, cache: KVCache, adapters: RowAdapters | None = None
    ) -> torch.Tensor:
        """Compute prompts and store their keys and values; return final hidden states [N, hidden].

        ``adapters`` are those of the N tokens; None: the model alone.
        """
        rotations = self._rotated(batch.positions).unsqueeze(1)
        hidden = functional.embedding(batch.token_ids, weights.embedding)
        if batch.images is not None:
            hidden[batch.images.rows] = batch.images.features
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(weights.layers):
            change = None if adapters is None else functools.partial(adapters.add, index)
            qkv = self._project(layer, change, hidden, rotations)
            attended = self._attend_prompts(qkv, batch, cache.data[index])
            hidden = self._finish_layer(layer, change, hidden, attended, chosen)
        if chosen:
            _store_prompts(torch.stack(chosen, dim=1), batch, cache.experts)
        return self._norm(hidden, weights.final_norm)

    def decode(
        self,
        weights: Weights,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        num_columns: int,
        mask: torch.Tensor | None,
        cache: KVCache,
        adapters: RowAdapters | None = None,
        rotary_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [n, vocab] float32 of one more token for each of the n running sequences, in rows 0..n-1 of the cache.

        ``token_ids`` [n] int64 are the tokens whose successors are wanted, ``positions`` [n] int64 where their keys and values are stored.
        ``num_columns`` is the longest of the sequences, this token included; ``mask`` [n, num_columns] is additive (0 or -inf), None when all
        are equally long. ``rotary_positions`` [n] int64 are those by which tokens are rotated; None: ``positions``. Behind an image they are
        less, as the image's tokens share positions.
        """
        config = self.config
        num = token_ids.shape[0]
        rows = torch.arange(num, device=token_ids.device)
        rotations = self._rotated(positions if rotary_positions is None else rotary_positions).unsqueeze(1)
        hidden = functional.embedding(token_ids, weights.embedding)
        bias = None if mask is None else self._mask_bias(mask)
        kv_start = config.num_heads * config.head_dim
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(weights.layers):
            change = None if adapters is None else functools.partial(adapters.add, index)
            qkv = self._project(layer, change, hidden, rotations)
            stored = cache.data[index]
            new = qkv[:, kv_start:].view(num, 2, config.num_kv_heads, config.head_dim).transpose(1, 2)
            stored[rows, :, :, positions] = new
            attended = self._attend_step(qkv[:, :kv_start], stored[:num, :, :, :num_columns], bias)
            hidden = self._finish_layer(layer, change, hidden, attended, chosen)
        if chosen:
            cache.experts[rows, positions] = torch.stack(chosen, dim=1).to(cache.experts.dtype)
        return self.logits(weights, self._norm(hidden, weights.final_norm))

    def _rotated(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotations [N, head_dim / 2] of positions [N], or [N, 3] of which each frequency takes one."""
        if positions.dim() == 1:
            return self._rotations[positions]
        assert self._axes is not None
        return self._rotations[positions[:, self._axes], self._frequencies]

    def logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        return weights.head(hidden).float()

    def _project(
        self, layer: Layer, change: Change | None, hidden: torch.Tensor, rotations: torch.Tensor
    ) -> torch.Tensor:
        """Return q, k, v of every token in one row [N, (heads + 2 kv heads) * head_dim], q and k rotated."""
        config = self.config
        qkv = _product(layer.qkv, self._norm(hidden, layer.attention_norm), "qkv", change)
        qk = qkv[:, : self._num_rotated * config.head_dim].view(-1, self._num_rotated, config.head_dim)
        rotated = qk
        if layer.qk_norm is not None:
            rotated = functional.rms_norm(qk, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm)
        pairs = torch.view_as_complex(rotated.float().unflatten(-1, (-1, 2)))
        qk.copy_(torch.view_as_real(pairs * rotations).flatten(-2))
        return qkv

    def _attend_prompts(self, qkv: torch.Tensor, batch: PromptBatch, stored: torch.Tensor) -> torch.Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        attended = torch.empty(qkv.shape[0], heads * dim, device=qkv.device, dtype=qkv.dtype)
        token, prompt, row = 0, 0, batch.first_row
        for num, start, length in batch.spans:
            rows = slice(token, token + num * length)
            parts = qkv[rows].view(num, length, heads + 2 * kv_heads, dim).transpose(1, 2)
            query, key, value = parts.split((heads, kv_heads, kv_heads), dim=1)
            pairs = torch.stack((key, value), dim=2)  # [num, kv heads, 2, length, dim]
            copies = batch.copies[prompt : prompt + num]
            if any(count != 1 for count in copies):
                pairs = pairs.repeat_interleave(torch.tensor(copies, device=qkv.device), dim=0)
            stored[row : row + pairs.shape[0], :, :, start : start + length] = pairs
            if start:
                cache_rows = stored[row : row + len(pairs)]
                if len(pairs) != num:  # of each prompt one of its rows
                    cache_rows = cache_rows[
                        torch.tensor([0, *copies[:-1]], device=qkv.device).cumsum(0), :, :, : start + length
                    ]
                out = self._attend_behind(query, cache_rows[:, :, :, : start + length], start)
            else:
                out = functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=heads != kv_heads
                )
            attended[rows].view(num, length, heads, dim).copy_(out.transpose(1, 2))
            token, prompt, row = token + num * length, prompt + num, row + pairs.shape[0]
        attended[token:] = 0
        return attended

    def _attend_behind(self, query: torch.Tensor, stored: torch.Tensor, start: int) -> torch.Tensor:
        """Attend from tokens behind ``start`` known ones.

        ``query`` is [n, heads, length, dim], ``stored`` [n, kv heads, 2, start + length, dim]; returns what ``query`` is.
        """
        length, out = query.shape[2], []
        for at in range(0, length, _QUERIES_AT_ONCE):
            part = query[:, :, at : at + _QUERIES_AT_ONCE]
            columns = start + at + part.shape[2]
            visible = torch.ones(part.shape[2], columns, dtype=torch.bool, device=query.device).tril_(start + at)
            keys, values = stored[:, :, 0, :columns], stored[:, :, 1, :columns]
            gqa = query.shape[1] != stored.shape[1]
            out.append(functional.scaled_dot_product_attention(part, keys, values, attn_mask=visible, enable_gqa=gqa))
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]

    def _attend_step(self, query: torch.Tensor, stored: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Attend from one token per sequence; ``stored`` is [n, kv heads, 2, columns, dim]."""
        config = self.config
        num, kv_heads, dim = stored.shape[0], config.num_kv_heads, config.head_dim
        # The heads that share a key head become the "tokens" of one query: no key is copied.
        query = query.reshape(num, kv_heads, -1, dim)
        if not self._by_products:
            out = functional.scaled_dot_product_attention(query, stored[:, :, 0], stored[:, :, 1], attn_mask=bias)
            return out.reshape(num, -1)
        flat = stored.flatten(0, 1)  # a view: both axes are contiguous
        queries = query.flatten(0, 1)
        keys = flat[:, 0].transpose(1, 2)
        if bias is None:
            empty = queries.new_empty(1, 1, 1)
            scores = torch.baddbmm(empty, queries, keys, beta=0, alpha=self._scale)
        else:
            scores = torch.baddbmm(bias, queries, keys, alpha=self._scale)
        return torch.bmm(scores.softmax(-1), flat[:, 1]).view(num, -1)

    def _mask_bias(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._by_products:
            return mask[:, None, None, :].to(self.dtype)
        return mask[:, None, :].repeat_interleave(self.config.num_kv_heads, dim=0)

    def _finish_layer(
        self,
        layer: Layer,
        change: Change | None,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        chosen: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the layer's output; the experts [N, k] of one that has some are added to ``chosen``."""
        hidden = _product(layer.output, attended, "output", change).add_(hidden)
        normed = self._norm(hidden, layer.mlp_norm)
        if isinstance(layer.mlp, Experts):  # adapters have no factors for them
            gates, experts = layer.mlp.choose(normed)
            chosen.append(experts)
            return layer.mlp.compute(normed, gates, experts).add_(hidden)
        gate, up = _product(layer.mlp.gate_up, normed, "gate_up", change).chunk(2, dim=-1)
        return _product(layer.mlp.down, functional.silu(gate).mul_(up), "down", change).add_(hidden)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.norm_eps)


def rotary_table(rope: Rope, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return exp(i * position * frequency), [num_positions, head_dim / 2] complex64."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    if rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _llama3_frequencies(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    turns = rope.original_context_tokens * frequencies / (2 * math.pi)  # full turns within the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


def _store_prompts(chosen: torch.Tensor, batch: PromptBatch, stored: torch.Tensor) -> None:
    """Store the experts of packed prompts, [N, layers, k], in the cache rows of each prompt's copies."""
    token, prompt, row = 0, 0, batch.first_row
    for num, start, length in batch.spans:
        for _ in range(num):
            copies, columns = slice(row, row + batch.copies[prompt]), slice(start, start + length)
            stored[copies, columns] = chosen[token : token + length].to(stored.dtype)
            token, row, prompt = token + length, row + batch.copies[prompt], prompt + 1


def _product(linear: Linear, rows: torch.Tensor, site: Site, change: Change | None) -> torch.Tensor:
    product = linear(rows)
    if change is not None:
        change(site, rows, product)
    return product
