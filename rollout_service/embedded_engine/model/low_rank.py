"""Low-rank adapters: reading a folder, and computing a batch whose rows have different adapters, or none.

A mix concatenates the factors of several adapters: ``x @ down`` computes the low-rank activations of every row for all of
them, a mask zeroes those of other adapters, and ``@ up`` adds the sum. This costs two small products for each matrix,
however many adapters there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from penstock.protocol.errors import MalformedWeights, UnsupportedModel
from penstock.protocol.weights.adapter_format import ADAPTER_WEIGHTS, AdapterConfig, check_served, pair_tensors
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused
from penstock.rollout_service.embedded_engine.model.model_config import ModelConfig
from penstock.rollout_service.embedded_engine.model.vision_tower import PREFIX
from penstock.rollout_service.embedded_engine.model.weights import (
    check_values,
    expected_shapes,
    interleaved_halves,
    read_safetensors,
)

Site: TypeAlias = Literal["qkv", "output", "gate_up", "down"]  # the fused matrices of a layer
_SITES: tuple[Site, ...] = ("qkv", "output", "gate_up", "down")

_numbers = itertools.count(1)  # unique in this process: an adapter that is loaded again gets a new number


class LowRank(NamedTuple):
    """Factors of one matrix's update: [rank, in] and [out, rank] as stored, [in, rank] and [rank, out] as prepared."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One loaded adapter, ready to compute; immutable."""

    name: str
    path: str
    layers: tuple[Mapping[Site, LowRank], ...]
    number: int  # unique in this process


def prepare_adapter(
    name: str,
    path: str,
    factors: Mapping[str, LowRank],
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Adapter:
    """Fuse, reorder and cast checked factors, by the names of their layers, like the matrices they are added to."""
    heads = config.num_heads, config.num_kv_heads
    query, kv = (num * config.head_dim for num in heads)
    sites: dict[Site, Sequence[tuple[str, int]]] = {
        "qkv": (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
        "output": (("self_attn.o_proj", config.hidden_size),),
        "gate_up": (("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)),
        "down": (("mlp.down_proj", config.hidden_size),),
    }
    order = interleaved_halves(config.head_dim)

    def ordered(part: str, up: torch.Tensor) -> torch.Tensor:
        if not part.endswith(("q_proj", "k_proj")):
            return up
        return up.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)

    def fuse(index: int, parts: Sequence[tuple[str, int]]) -> LowRank | None:
        pairs = {part: factors.get(f"model.layers.{index}.{part}") for part, _ in parts}
        adapted_parts = {part: pair for part, pair in pairs.items() if pair is not None}
        if not adapted_parts:
            return None
        down = torch.cat([pair.down for pair in adapted_parts.values()])
        up = torch.zeros(sum(width for _, width in parts), down.shape[0])
        row = column = 0
        for part, width in parts:
            if (pair := pairs[part]) is not None:
                rank = pair.up.shape[1]
                up[row : row + width, column : column + rank] = ordered(part, pair.up)
                column += rank
            row += width
        return LowRank(
            down.t().contiguous().to(device=device, dtype=dtype), up.t().contiguous().to(device=device, dtype=dtype)
        )

    def layer(index: int) -> Mapping[Site, LowRank]:
        return {site: pair for site in _SITES if (pair := fuse(index, sites[site])) is not None}

    return Adapter(name, path, tuple(map(layer, range(config.num_layers))), next(_numbers))


class AdapterMix:
    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.numbers = frozenset(adapter.number for adapter in adapters)
        self._owners: dict[Site, torch.Tensor] = {}  # [columns] int64: adapter number of each column
        by_layer = zip(*(adapter.layers for adapter in adapters), strict=True)
        numbers = [adapter.number for adapter in adapters]
        self._layers = [self._join(list(zip(numbers, layers, strict=True))) for layers in by_layer]

    def of_rows(self, numbers: torch.Tensor) -> RowAdapters:
        """Return the update for rows whose adapters have these ``numbers`` [n] int64, `NO_ADAPTER` for none."""
        if len(self.numbers) == 1 and bool((numbers == next(iter(self.numbers))).all()):
            return RowAdapters(self._layers, {})
        column = numbers.unsqueeze(1)
        return RowAdapters(self._layers, {site: owners != column for site, owners in self._owners.items()})

    def _join(self, numbered_layers: Sequence[tuple[int, Mapping[Site, LowRank]]]) -> Mapping[Site, LowRank]:
        joined: dict[Site, LowRank] = {}
        for site in _SITES:
            pairs = [(number, layer[site]) for number, layer in numbered_layers if site in layer]
            if not pairs:
                continue
            device = pairs[0][1].down.device
            owners = [torch.full((pair.down.shape[1],), number, device=device) for number, pair in pairs]
            # equal in all layers: an adapter has a site in all of them, or in none
            self._owners[site] = torch.cat(owners)
            if len(pairs) == 1:
                joined[site] = pairs[0][1]
            else:
                downs, ups = (torch.cat([pair[part] for _, pair in pairs], dim=1 - part) for part in (0, 1))
                joined[site] = LowRank(downs, ups)
        return joined


class RowAdapters:
    def __init__(self, layers: Sequence[Mapping[Site, LowRank]], others: Mapping[Site, torch.Tensor]) -> None:
        """``others`` [n, columns] bool is True for columns of another adapter than the row's; no entry: there is none."""
        self._layers = layers
        self._others = others

    def add(self, index: int, site: Site, rows: torch.Tensor, product: torch.Tensor) -> None:
        """Add to ``product`` [n, out], in place, the adapters' update for ``rows`` [n, in] at this layer and site."""
        pair = self._layers[index].get(site)
        if pair is None:
            return
        activations = rows @ pair.down
        others = self._others.get(site)
        if others is not None:
            activations.masked_fill_(others, 0.0)
        product.addmm_(activations, pair.up)


def read_adapter(folder: Path, model: ModelConfig, *, max_rank: int) -> dict[str, LowRank]:
    """Return the factors of every adapted layer by its name in the model, multiplied by the scale; raises CheckpointRefused.

    Each ``down`` is [rank, in] in the file's dtype, each ``up`` [out, rank] in float32.
    """
    try:
        config = AdapterConfig.from_peft(folder)
        check_served(config.target_modules, "target_modules")
        if config.r > max_rank:
            raise MalformedWeights(f"its rank is {config.r}, the engine was started with --max-lora-rank {max_rank}")
        tensors = read_safetensors(folder / ADAPTER_WEIGHTS)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        pairs = pair_tensors(config, shapes, expected_shapes(model))
        if of_experts := [layer for layer in pairs if ".mlp.experts." in layer or layer.endswith(".mlp.gate")]:
            raise MalformedWeights(
                f"it adapts {of_experts[0]}: adapters of experts and routers are not computed by this engine"
            )
        if of_tower := [layer for layer in pairs if layer.startswith(PREFIX)]:
            raise MalformedWeights(
                f"it adapts {of_tower[0]}: adapters of a vision tower are not computed by this engine"
            )
    except (OSError, ValueError, MalformedWeights, UnsupportedModel) as error:
        raise CheckpointRefused(f"{folder}: {error}") from error
    for name, tensor in tensors.items():
        check_values(folder, name, tensor)
    return {
        layer: LowRank(tensors[pair.down], tensors[pair.up].to(torch.float32) * config.scale)
        for layer, pair in pairs.items()
    }
