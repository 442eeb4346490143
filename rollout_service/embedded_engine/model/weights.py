"""A model's weights, ready to compute: the matrices of each layer fused, reordered and packed (`transformer.py` says how).

A mixture of experts is that of Qwen3-MoE in transformers: a router's probabilities over all experts in float32, the ``top_k`` largest,
divided by their sum where the model's config says so. Which experts computed a token is returned, so that a trainer can compute it
with the same ones (Rollout Routing Replay, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from penstock.protocol.weights.layout import tensor_digest, weights_digest
from penstock.rollout_service.embedded_engine.model.low_rank import interleaved_halves
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.model.vision_tower import hub_name, tower_tensors

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear  # [*, hidden] -> [*, 2 * intermediate]: all gate, then all up
    down: Linear  # [*, intermediate] -> [*, hidden]


@dataclass(frozen=True, slots=True)
class Experts:
    router: torch.Tensor  # [experts, hidden]
    gate_up: tuple[Linear, ...]  # of each expert, [*, hidden] -> [*, 2 * intermediate]: all gate, then all up
    down: tuple[Linear, ...]  # of each expert, [*, intermediate] -> [*, hidden]
    top_k: int
    normalised: bool  # a token's gates add up to 1

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gates [N, k], in the dtype of ``hidden`` [N, hidden], and the chosen experts [N, k] int64."""
        logits = functional.linear(hidden, self.router)
        gates, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalised:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates.to(logits.dtype), chosen

    def compute(self, hidden: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs, each times its gate, [N, hidden]."""
        products = hidden.new_empty(*chosen.shape, hidden.shape[1])  # [N, k, hidden]
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            gate, up = self.gate_up[expert](hidden[token]).chunk(2, dim=-1)
            products[token, place] = self.down[expert](functional.silu(gate).mul_(up))
        return (products * gates.unsqueeze(-1)).sum(1)


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [*, hidden] -> [*, (heads + 2 * kv heads) * head_dim]: all q, then all k, then all v
    qk_norm: torch.Tensor | None  # [heads + kv heads, head_dim], reordered like q and k
    output: Linear  # [*, heads * head_dim] -> [*, hidden]
    mlp_norm: torch.Tensor  # [hidden]
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete model, ready to compute; immutable, so that a swap exchanges one reference."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor  # [hidden]
    head: Linear  # [*, hidden] -> [*, vocab]
    tower: Mapping[str, torch.Tensor]  # of the vision tower, which `VisionTower` computes with; empty: text alone
    num_parameters: int
    checksum: str  # `weights_digest` of the tensors they were made from, as they were stored


def prepare_weights(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Fuse, reorder, cast and pack a checked checkpoint; ``tensors`` is not modified."""
    stored = tensors if config.vision is None else {hub_name(name): tensor for name, tensor in tensors.items()}
    checkpoint = _Checkpoint(config, stored, device, dtype)
    embedding = checkpoint.get("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(checkpoint.layer(index) for index in range(config.num_layers)),
        final_norm=checkpoint.get("model.norm.weight"),
        head=_linear(embedding if config.tied_head else checkpoint.get("lm_head.weight"), None),
        tower=tower_tensors(stored, device=device, dtype=dtype),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        checksum=_checksum(tensors),
    )


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    config: ModelConfig
    stored: Mapping[str, torch.Tensor]
    device: torch.device
    dtype: torch.dtype

    def get(self, name: str) -> torch.Tensor:
        return self.stored[name].to(device=self.device, dtype=self.dtype)

    def optional(self, name: str, *, wanted: bool) -> torch.Tensor | None:
        return self.get(name) if wanted else None

    def by_head(self, name: str) -> torch.Tensor:
        order = interleaved_halves(self.config.head_dim)
        return self.get(name).unflatten(0, (-1, self.config.head_dim))[:, order].flatten(0, 1)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        bias = self.optional(f"{attention}o_proj.bias", wanted=config.output_bias)
        return Layer(
            attention_norm=self.get(f"{prefix}input_layernorm.weight"),
            qkv=_linear(self._qkv(attention, "weight"), self._qkv(attention, "bias") if config.qkv_bias else None),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            output=_linear(self.get(f"{attention}o_proj.weight"), bias),
            mlp_norm=self.get(f"{prefix}post_attention_layernorm.weight"),
            mlp=self.experts(f"{prefix}mlp.") if index in config.expert_layers else self.mlp(f"{prefix}mlp."),
        )

    def _qkv(self, attention: str, part: str) -> torch.Tensor:
        rotated = [self.by_head(f"{attention}{name}_proj.{part}") for name in ("q", "k")]
        return torch.cat([*rotated, self.get(f"{attention}v_proj.{part}")])

    def _qk_norm(self, attention: str) -> torch.Tensor:
        order = interleaved_halves(self.config.head_dim)
        query, key = (self.get(f"{attention}{name}_norm.weight")[order] for name in ("q", "k"))
        return torch.cat([query.expand(self.config.num_heads, -1), key.expand(self.config.num_kv_heads, -1)])

    def mlp(self, prefix: str) -> Mlp:
        gate_up = torch.cat([self.get(f"{prefix}gate_proj.weight"), self.get(f"{prefix}up_proj.weight")])
        if not self.config.mlp_bias:
            return Mlp(_linear(gate_up, None), _linear(self.get(f"{prefix}down_proj.weight"), None))
        bias = torch.cat([self.get(f"{prefix}gate_proj.bias"), self.get(f"{prefix}up_proj.bias")])
        down = _linear(self.get(f"{prefix}down_proj.weight"), self.get(f"{prefix}down_proj.bias"))
        return Mlp(_linear(gate_up, bias), down)

    def experts(self, prefix: str) -> Experts:
        mixture = self.config.mixture
        assert mixture is not None
        each = [self.mlp(f"{prefix}experts.{number}.") for number in range(mixture.num_experts)]
        return Experts(
            router=self.get(f"{prefix}gate.weight"),
            gate_up=tuple(mlp.gate_up for mlp in each),
            down=tuple(mlp.down for mlp in each),
            top_k=mixture.top_k,
            normalised=mixture.normalised,
        )


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    return weights_digest(
        tensor_digest(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tensor.shape,
            tensor.reshape(-1).view(torch.uint8).numpy().data,
        )
        for name, tensor in tensors.items()
    )


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return x -> x W^T + b, packed for oneDNN where that is faster."""
    packable = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if packable and weight.dtype == torch.float32:
        multiply = torch.ops.mkldnn._linear_pointwise.default
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        return lambda x: multiply(x, packed, bias, "none", [], "")
    return lambda x: functional.linear(x, weight, bias)
