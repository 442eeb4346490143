"""A model's weights: read completely from a folder and checked, then fused, reordered and packed (`transformer.py` says how).

Everything that makes SGLang 0.5.23 exit or serve a mixture (truncated file, wrong shape, missing tensor, NaN) is found here, while the engine
serves, so that a refused update leaves the served weights unchanged.

A mixture of experts is that of Qwen3-MoE in transformers: a router's probabilities over all experts in float32, the ``top_k`` largest,
divided by their sum where the model's config says so. Which experts computed a token is returned, so that a trainer can compute it
with the same ones (Rollout Routing Replay, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from penstock.protocol.errors import UnsupportedModel
from penstock.protocol.files import open_regular
from penstock.protocol.model_folder import INDEX, weight_files
from penstock.protocol.weights.layout import tensor_digest, weights_digest
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.model.vision_tower import hub_name, tower_shapes, tower_tensors

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # a buffer in old checkpoints; computed here
_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
Linear = Callable[[torch.Tensor], torch.Tensor]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.output_bias:
        layer |= {"self_attn.o_proj.bias": (hidden,)}
    if config.mlp_bias:
        layer |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if config.vision is not None:
        shapes |= tower_shapes(config.vision)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    dense = _mlp(hidden, inner)
    for index in range(config.num_layers):
        mlp = _experts(config) if index in config.expert_layers else dense
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in (layer | mlp).items()}
    return shapes


def _mlp(hidden: int, inner: int, prefix: str = "mlp") -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _experts(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    mixture = config.mixture
    assert mixture is not None
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (mixture.num_experts, config.hidden_size)}
    for expert in range(mixture.num_experts):
        shapes |= _mlp(config.hidden_size, mixture.intermediate_size, f"mlp.experts.{expert}")
    return shapes


def read_checkpoint(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read every tensor of the model from ``folder``: one model.safetensors, or shards named by the index.

    The tensors are on the CPU in the file's dtype, each with the expected shape and all numbers finite, by the names in the file: those of
    `expected_shapes`, or all of a model with images by their names in transformers' module (`hub_name`). Raises CheckpointRefused, which
    names the file, the tensor, what was expected and what was found.
    """
    expected = expected_shapes(config)
    tensors: dict[str, torch.Tensor] = {}
    for path in _files_of(folder):
        tensors |= read_safetensors(path)
    ignored = {name for name in tensors if name.endswith(_IGNORED_SUFFIXES)}
    if config.tied_head:
        ignored.add("lm_head.weight")  # the embedding is the head; a stored copy is redundant
    for name in ignored & tensors.keys():
        del tensors[name]
    stored = (
        {hub_name(name): name for name in tensors} if config.vision is not None else {name: name for name in tensors}
    )
    _check_names(folder, expected.keys(), stored.keys() if len(stored) == len(tensors) else tensors.keys())
    for name, shape in expected.items():
        _check_tensor(folder, name, shape, tensors[stored[name]])
    return tensors


def _files_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointRefused(f"{folder} is not a folder; nothing was changed")
    if (folder / INDEX).is_file():
        try:
            return weight_files(folder)
        except UnsupportedModel as error:
            raise CheckpointRefused(f"{error}; nothing was changed") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointRefused(f"{folder} holds no *.safetensors file; nothing was changed")
    return files


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with open_regular(path, follow=True), safe_open(path, framework="pt") as file:
            # clone: the file may be overwritten later, and a mapped page would change with it
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointRefused(f"{path} is truncated or not a safetensors file: {error}") from error


def _check_names(folder: Path, expected: Set[str], actual: Set[str]) -> None:
    missing, unknown = sorted(expected - actual), sorted(actual - expected)
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"{len(missing)} tensors missing, e.g. {', '.join(missing[:3])}")
        if unknown:
            parts.append(f"{len(unknown)} tensors unknown to this model, e.g. {', '.join(unknown[:3])}")
        raise CheckpointRefused(f"{folder}: {'; '.join(parts)}; nothing was changed")


def _check_tensor(folder: Path, name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointRefused(f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
    check_values(folder, name, tensor)


def check_values(folder: Path, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _FLOAT_TYPES:
        raise CheckpointRefused(f"{folder}: {name} is {tensor.dtype}, expected float32, bfloat16 or float16")
    # If a term is not finite, neither is the sum. The sum of finite terms may overflow, so then check each.
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise CheckpointRefused(f"{folder}: {name} holds NaN or infinite numbers; nothing was changed")


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


def interleaved_halves(head_dim: int) -> torch.Tensor:
    """Return the order 0, d/2, 1, d/2 + 1, ...: rotary embedding mixes dimension i with i + d/2."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


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
