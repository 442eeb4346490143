"""Low-rank adapters (LoRA, arXiv 2106.09685) inside a model: the door to peft.

A layer's weight W stays as it is and computes with ``W + (alpha / rank) B A``, where only A and B learn. B
starts at 0: the first policy is the model, and with its adapters switched off it is the model at any time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.protocol.weights.adapter_format import AdapterConfig
from penstock.trainer.errors import UnsupportedModel

_NAME = "default"  # peft's name of an adapter that nobody named
_SEED = 0  # of A: the same on every rank, and again after a restart
_BASE, _ADAPTER = ".base_layer.", ".lora_"


@dataclass(frozen=True, slots=True)
class Lora:
    """What is adapted, and how."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # endings of module names; none: every linear layer but the output head


def attach(model: nn.Module, lora: Lora) -> None:
    """Put adapters into a `transformers` model and freeze the rest; raises UnsupportedModel where no layer fits."""
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415  seconds of import, only where it is needed

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  any number will do
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as err:
            raise UnsupportedModel(f"model.lora.targets = {list(lora.targets)} do not fit the model: {err}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    model.to(dtype)


def is_adapter(name: str) -> bool:
    """Say whether a parameter belongs to an adapter."""
    return _ADAPTER in name


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def factors(module: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter, float]]:
    """Return A, B and their scale for every adapted weight, by the name that the weight has in ``module``."""
    found = {}
    for name, layer in _layers(module):
        down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        found[f"{name}.base_layer.weight"] = (down, up, float(layer.scaling[_NAME]))
    return found


def config(module: nn.Module) -> AdapterConfig | None:
    """Return how the adapters of a module count, and which layers have them; None without adapters."""
    layers = dict(_layers(module))
    if not layers:
        return None
    first = next(iter(layers.values()))
    return AdapterConfig(
        r=first.r[_NAME],
        lora_alpha=first.lora_alpha[_NAME],
        target_modules=tuple(sorted({name.rpartition(".")[2] for name in layers})),
    )


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return ``W + scale B A`` in W's dtype, computed in float32."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)


@contextlib.contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Compute without adapters for a while.

    peft's own switch also takes the gradients away, which the hooks that shard them do not survive.
    """
    layers = [layer for _, layer in _layers(module)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer
