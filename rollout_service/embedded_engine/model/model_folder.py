"""The adapter for safetensors: read a model folder completely and check it before it is used.

Everything that makes SGLang 0.5.23 exit or serve a mixture (truncated file, wrong shape, missing tensor,
NaN) is found here, while the engine serves, so that a refused update leaves the served weights unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock.rollout_service.embedded_engine.errors import CheckpointRefused
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.model.vision_tower import hub_name, tower_shapes

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # a buffer in old checkpoints; computed here
_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    """Return the tensors of a layer with experts, as transformers and the model hub store them: each expert's apart."""
    mixture = config.mixture
    assert mixture is not None
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (mixture.num_experts, config.hidden_size)}
    for expert in range(mixture.num_experts):
        shapes |= _mlp(config.hidden_size, mixture.intermediate_size, f"mlp.experts.{expert}")
    return shapes


def read_checkpoint(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read every tensor of the model from ``folder``: one model.safetensors, or shards named by the index.

    Returns:
        Tensors on the CPU in the file's own dtype, each with the expected shape and all numbers finite, by the names in the file:
        those of `expected_shapes`, or all of a model with images by their names in transformers' module (`hub_name`).

    Raises:
        CheckpointRefused: names the file, the tensor, what was expected and what was found.
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
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointRefused(f"{index} is not a safetensors index: {error!r}") from error
        if foreign := [name for name in names if not isinstance(name, str) or "/" in name or name.startswith(".")]:
            raise CheckpointRefused(
                f"{index} names {foreign[0]!r}, which is not a file of the folder; nothing was changed"
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointRefused(f"{folder}: the index names {', '.join(missing)}, which the folder does not hold")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointRefused(f"{folder} holds no *.safetensors file; nothing was changed")
    return files


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            # clone: the file may be overwritten later, and a mapped page would change with it
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointRefused(f"{path} is truncated or not a safetensors file: {error}") from error


def _check_names(folder: Path, expected: Set[str], found: Set[str]) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
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
    """Raise CheckpointRefused for a tensor that is no floating-point tensor of finite numbers."""
    if tensor.dtype not in _FLOAT_TYPES:
        raise CheckpointRefused(f"{folder}: {name} is {tensor.dtype}, expected float32, bfloat16 or float16")
    # If a term is not finite, neither is the sum. The sum of finite terms may overflow, so then check each.
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise CheckpointRefused(f"{folder}: {name} holds NaN or infinite numbers; nothing was changed")
