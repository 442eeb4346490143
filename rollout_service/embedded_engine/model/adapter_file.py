"""Read an adapter folder completely and check it before it is used; see `checks/adapter_shapes.py`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.rollout_service.checks.adapter_shapes import pair_tensors, read_config
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused
from penstock.rollout_service.embedded_engine.model.low_rank import LowRank
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.model.model_folder import check_values, expected_shapes, read_safetensors
from penstock.rollout_service.embedded_engine.model.vision_tower import PREFIX
from penstock.rollout_service.errors import AdapterUnfit


def read_adapter(folder: Path, model: ModelConfig, *, max_rank: int) -> dict[str, LowRank]:
    """Return the factors of every adapted layer by its name in the model, multiplied by the scale.

    Each ``down`` is [rank, in] in the file's own dtype, each ``up`` [out, rank] in float32.

    Raises:
        CheckpointRefused: names the folder and what in it does not fit.
    """
    try:
        raw = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config = read_config(raw)
        if config.rank > max_rank:
            raise AdapterUnfit(f"its rank is {config.rank}, the engine was started with --max-lora-rank {max_rank}")
        tensors = read_safetensors(folder / ADAPTER_WEIGHTS)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        pairs = pair_tensors(config, shapes, expected_shapes(model))
        if of_experts := [layer for layer in pairs if ".mlp.experts." in layer or layer.endswith(".mlp.gate")]:
            raise AdapterUnfit(
                f"it adapts {of_experts[0]}: adapters of experts and routers are not computed by this engine"
            )
        if of_tower := [layer for layer in pairs if layer.startswith(PREFIX)]:
            raise AdapterUnfit(f"it adapts {of_tower[0]}: adapters of a vision tower are not computed by this engine")
    except (OSError, ValueError, AdapterUnfit) as error:
        raise CheckpointRefused(f"{folder}: {error}") from error
    for name, tensor in tensors.items():
        check_values(folder, name, tensor)
    return {
        layer: LowRank(tensors[pair.down], tensors[pair.up].to(torch.float32) * config.scale)
        for layer, pair in pairs.items()
    }
