"""The routers of a mixture of experts, as its config.json describes them; pure.

A router chooses ``top_k`` of a layer's experts for every token. Workers read how many there are to check what an engine
returns, the trainer to check what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.protocol.facts import MAX_EXPERTS, RouterShape

FAMILIES = ("qwen3_moe",)  # model_type whose routers are compared with transformers' in tests
_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Routers:
    """The layers with experts, and what their routers choose."""

    layers: tuple[int, ...]  # numbers of the layers, rising
    num_experts: int  # of a layer
    top_k: int  # different experts for each token

    @property
    def shape(self) -> RouterShape:
        """What is stored of a token's choices."""
        return RouterShape(num_layers=len(self.layers), num_experts=self.num_experts, top_k=self.top_k)


def routers_of(config: Mapping[str, Any]) -> Routers | None:
    """Return the routers of a model; None for one without experts, or of a family that is not in `FAMILIES`.

    Raises ValueError for numbers that cannot be a model's.
    """
    if config.get("model_type") not in FAMILIES:
        return None
    num_layers = _number(config, "num_hidden_layers", 1, _MAX_LAYERS)
    num_experts = _number(config, "num_experts" if "num_experts" in config else "num_local_experts", 0, MAX_EXPERTS)
    step = _number({"decoder_sparse_step": 1, **config}, "decoder_sparse_step", 1, _MAX_LAYERS)
    dense = config.get("mlp_only_layers") or ()
    layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    if not num_experts or not layers:
        return None
    return Routers(layers, num_experts, _number(config, "num_experts_per_tok", 1, num_experts))


def _number(config: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{key} = {value!r}: expected a number from {least} to {most}")
    return value
