"""The quickstart's Qwen3 model as plain functions of its tensors, computing the prompt of a group once.

For single-process experiments only: the same weights give the same log-probabilities as transformers, several times faster for
groups of short completions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float

    @classmethod
    def of(cls, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text())
        return cls(
            config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"],
            config["head_dim"], config["rope_theta"], config["rms_norm_eps"],
        )  # fmt: skip


def read(folder: Path) -> Tensors:
    return {name: tensor.requires_grad_() for name, tensor in load_file(folder / "model.safetensors").items()}


def _rotated(x: Tensor, start: int, shape: Shape) -> Tensor:
    half = shape.head_dim // 2
    positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
    angles = positions[:, None] * shape.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _projected(w: Tensors, layer: int, hidden: Tensor, start: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    name = f"model.layers.{layer}."
    normed = F.rms_norm(hidden, hidden.shape[-1:], w[name + "input_layernorm.weight"], shape.eps)

    def heads(which: str, count: int) -> Tensor:
        return F.linear(normed, w[f"{name}self_attn.{which}_proj.weight"]).unflatten(-1, (count, -1)).transpose(1, 2)

    query = F.rms_norm(heads("q", shape.heads), (shape.head_dim,), w[name + "self_attn.q_norm.weight"], shape.eps)
    key = F.rms_norm(heads("k", shape.kv_heads), (shape.head_dim,), w[name + "self_attn.k_norm.weight"], shape.eps)
    return _rotated(query, start, shape), _rotated(key, start, shape), heads("v", shape.kv_heads)


def _finished(w: Tensors, layer: int, hidden: Tensor, attended: Tensor, shape: Shape) -> Tensor:
    name = f"model.layers.{layer}."
    hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), w[name + "self_attn.o_proj.weight"])
    normed = F.rms_norm(hidden, hidden.shape[-1:], w[name + "post_attention_layernorm.weight"], shape.eps)
    gate, up = F.linear(normed, w[name + "mlp.gate_proj.weight"]), F.linear(normed, w[name + "mlp.up_proj.weight"])
    return hidden + F.linear(F.silu(gate) * up, w[name + "mlp.down_proj.weight"])


def logits_of(w: Tensors, hidden: Tensor, shape: Shape) -> Tensor:
    return F.linear(
        F.rms_norm(hidden, hidden.shape[-1:], w["model.norm.weight"], shape.eps), w["model.embed_tokens.weight"]
    )


def read_prompts(w: Tensors, prompts: Tensor, shape: Shape) -> tuple[Tensor, KeysValues]:
    """Return the last hidden state [P, H] and every layer's keys and values of prompts [P, T]."""
    hidden, kept = F.embedding(prompts, w["model.embed_tokens.weight"]), []
    for layer in range(shape.layers):
        query, key, value = _projected(w, layer, hidden, 0, shape)
        kept.append((key, value))
        repeats = shape.heads // shape.kv_heads
        attended = F.scaled_dot_product_attention(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), is_causal=True
        )
        hidden = _finished(w, layer, hidden, attended, shape)
    return hidden[:, -1], kept


def _attend(
    query: Tensor, prompt: tuple[Tensor, Tensor], completion: tuple[Tensor, Tensor], shape: Shape, mask: Tensor
) -> Tensor:
    """Attend from completions [P*G, heads, T, D] to their prompt's keys [P, ...] and the completions' keys [P*G, ...]."""
    rows, heads, steps, dim = query.shape
    repeats, groups = heads // shape.kv_heads, rows // prompt[0].shape[0]
    query = query * dim**-0.5
    wide = query.unflatten(0, (-1, groups)).unflatten(2, (-1, repeats))  # [P, G, kv, repeats, T, D]
    wide = wide.permute(0, 2, 1, 3, 4, 5).flatten(2, 4)  # [P, kv, G*repeats*T, D]
    to_prompt = wide @ prompt[0].transpose(-1, -2)
    narrow = query.unflatten(1, (-1, repeats)).flatten(2, 3)  # [P*G, kv, repeats*T, D]
    to_own = (narrow @ completion[0].transpose(-1, -2)).unflatten(2, (repeats, steps)) + mask

    def regroup(x: Tensor) -> Tensor:  # [P, kv, G*repeats*T, X] -> [P*G, kv, repeats, T, X]
        return x.unflatten(2, (groups, repeats, steps)).permute(0, 2, 1, 3, 4, 5).flatten(0, 1)

    weights = torch.cat([regroup(to_prompt), to_own], -1).softmax(-1)
    on_prompt, on_own = weights.split([to_prompt.shape[-1], to_own.shape[-1]], -1)
    wide = on_prompt.unflatten(0, (-1, groups)).permute(0, 2, 1, 3, 4, 5).flatten(2, 4)
    result = regroup(wide @ prompt[1]) + (on_own.flatten(2, 3) @ completion[1]).unflatten(2, (repeats, steps))
    return result.flatten(1, 2)


def completion_logits(w: Tensors, prompts: Tensor, completions: Tensor, shape: Shape) -> Tensor:
    """Score completions [P*G, T] of prompts [P, Tp], G in a row for each: logits [P*G, T, vocab] of every token."""
    last, kept = read_prompts(w, prompts, shape)
    groups, steps = len(completions) // len(prompts), completions.shape[1] - 1
    hidden = F.embedding(completions[:, :-1], w["model.embed_tokens.weight"])
    mask = torch.full((steps, steps), float("-inf")).triu(1)
    for layer in range(shape.layers):
        query, key, value = _projected(w, layer, hidden, prompts.shape[1], shape)
        hidden = _finished(w, layer, hidden, _attend(query, kept[layer], (key, value), shape, mask), shape)
    whole = torch.cat([last.repeat_interleave(groups, 0)[:, None], hidden], 1)
    return logits_of(w, whole, shape)


@torch.no_grad()
def generate(
    w: Tensors, prompts: Tensor, *, groups: int, longest: int, end: int, shape: Shape, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample (greedily without a generator): tokens, log-probabilities [P*G, longest] and lengths [P*G]."""
    last, kept = read_prompts(w, prompts, shape)
    rows = len(prompts) * groups
    logits = logits_of(w, last, shape).repeat_interleave(groups, 0)
    kv_cache = [
        (torch.zeros(rows, shape.kv_heads, longest, shape.head_dim), torch.zeros(rows, shape.kv_heads, longest, shape.head_dim))
        for _ in range(shape.layers)
    ]  # fmt: skip
    tokens, logprobs = torch.full((rows, longest), end), torch.zeros(rows, longest)
    lengths = torch.full((rows,), longest)
    open_ = torch.ones(rows, dtype=torch.bool)
    for step in range(longest):
        scores = logits.log_softmax(-1)
        chosen = (
            scores.argmax(-1) if generator is None else torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
        )
        chosen = torch.where(open_, chosen, end)
        tokens[:, step] = chosen
        logprobs[:, step] = scores.gather(1, chosen[:, None])[:, 0]
        lengths[open_ & (chosen == end)] = step + 1
        open_ = open_ & (chosen != end)
        if step + 1 == longest or not open_.any():
            break
        hidden = F.embedding(chosen[:, None], w["model.embed_tokens.weight"])
        for layer in range(shape.layers):
            query, key, value = _projected(w, layer, hidden, prompts.shape[1] + step, shape)
            kv_cache[layer][0][:, :, step : step + 1], kv_cache[layer][1][:, :, step : step + 1] = key, value
            seen = (kv_cache[layer][0][:, :, : step + 1], kv_cache[layer][1][:, :, : step + 1])
            hidden = _finished(w, layer, hidden, _attend(query, kept[layer], seen, shape, torch.zeros(())), shape)
        logits = logits_of(w, hidden[:, 0], shape)
    return tokens, logprobs, lengths
