"""Low-rank adapters (LoRA, arXiv 2106.09685) inside a model: the adapter of the peft library.

A layer computes with ``W + (alpha / rank) B A``, where W is frozen and only A and B are trained. B is initially 0,
so the first policy equals the model, and with adapters switched off it always does.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.protocol.errors import MalformedWeights
from penstock.protocol.model_folder import read_header
from penstock.protocol.weights.adapter_format import ADAPTER_WEIGHTS, AdapterConfig, check_tensors, factor_names
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.model_folder_check import tied_target

_NAME = "default"  # peft's name of an adapter without a name
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # what is adapted of a mixture of experts
_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "gate", "experts", "router"})
_BASE, _ADAPTER = ".base_layer.", ".lora_"


@dataclass(frozen=True, slots=True)
class Parts:
    """Of an adapted layer: it computes ``base(x) + scale up(low(x))``."""

    base: nn.Module
    low: Callable[[Tensor], Tensor]  # A, behind the dropout
    up: nn.Module | None  # B; None: the adapter is switched off
    scale: float


@dataclass(frozen=True, slots=True)
class Lora:
    rank: int
    alpha: float
    dropout: float = 0.0
    # Endings of module names; none: every linear layer but the output head, of a mixture of experts those of attention.
    targets: tuple[str, ...] = ()
    seed: int = 0  # of A: the same on every rank and after a restart
    path: Path | None = None  # folder of the adapter that is trained further


def attach(model: nn.Module, lora: Lora, *, head: str | None = None) -> None:
    """Put adapters into a `transformers` model and freeze the rest, but the module ``head``, which is trained whole.

    Raises UnsupportedModel: no layer matches the targets, or the head does, or they are of experts.
    """
    targets = list(lora.targets)
    if any(".experts." in name for name, _ in model.named_parameters()):
        if of_experts := [target for target in targets if target.rpartition(".")[2] in _EXPERTS]:
            raise UnsupportedModel(
                f"model.lora.targets = {targets}: {of_experts[0]} is of a layer's experts or its router, for which there are no adapters: "
                f"all experts are one tensor, and engines serve none; choose of {', '.join(_ATTENTION)}"
            )
        targets = targets or list(_ATTENTION)
    if head is not None and head in (target.rpartition(".")[2] for target in lora.targets):
        raise UnsupportedModel(
            f"model.lora.targets = {list(lora.targets)}: {head} is trained whole, beside the adapters; leave it out"
        )
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415  seconds of import, only where it is needed

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  peft accepts any number
        lora_dropout=lora.dropout,
        target_modules=targets or "all-linear",
        task_type="CAUSAL_LM" if head is None else "SEQ_CLS",  # whose "all-linear" leaves the head out
    )
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as err:
            raise UnsupportedModel(
                f"model.lora.targets = {list(lora.targets)} do not match the model ({err}); set names of its linear layers"
            ) from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or (head is not None and name.startswith(f"{head}.")))
    model.to(dtype)


def load(model: nn.Module, folder: Path) -> None:
    """Set a model's adapters to those of a folder in PEFT's form.

    Raises UnsupportedModel for another scale or a tensor of another layer or rank, or with a value that is not finite.
    """
    weights = {
        name: weight
        for layer, module in _layers(model)
        for name, weight in zip(
            factor_names(layer), (module.lora_A[_NAME].weight, module.lora_B[_NAME].weight), strict=True
        )
    }
    own = config(model)
    try:
        written, header = AdapterConfig.from_peft(folder), read_header(folder / ADAPTER_WEIGHTS)[0]
        if own is None or not math.isclose(written.scale, own.scale, rel_tol=1e-6):
            raise MalformedWeights(
                f"it is of rank {written.r} and alpha {written.lora_alpha:g}, and model.lora makes others of this model"
            )
        expected = {name: tuple(weight.shape) for name, weight in weights.items()}
        check_tensors({name: tuple(entry["shape"]) for name, entry in header.items()}, expected)
        stored = load_file(folder / ADAPTER_WEIGHTS)
        if wild := [name for name, tensor in stored.items() if not tensor.isfinite().all()]:
            raise MalformedWeights(f"{wild[0]} has a value that is not finite")
    except MalformedWeights as err:
        raise UnsupportedModel(
            f"the adapter {folder} does not fit: {err}; use the base model and the settings that it was trained with"
        ) from None
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(stored[name])


def is_adapter(name: str) -> bool:
    return _ADAPTER in name


def check_layers(module: nn.Module, targets: Sequence[str]) -> None:
    """Raise UnsupportedModel for targets of no layer, and for adapters that could be neither merged nor published.

    Asked where a training begins: a record of a run that began before is replayed with the layers that it had.
    """
    layers = dict(_layers(module))
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    if idle := [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]:
        raise UnsupportedModel(
            f"model.lora.targets = {list(targets)}: no layer of the model is called {idle[0]}; leave it out"
        )
    for name, layer in ((name.rpartition(".")[2], layer) for name, layer in layers.items()):
        if not isinstance(layer.base_layer, nn.Linear):
            raise UnsupportedModel(
                f"model.lora.targets = {list(targets)}: {name} is a layer of type {type(layer.base_layer).__name__}, of which no adapter "
                "is published or merged; set names of linear layers"
            )
        if uses[id(layer.base_layer.weight)] > 1:
            raise UnsupportedModel(tied_target(targets, name))


def plain_name(name: str) -> str:
    return name.replace(_BASE, ".")


def factors(module: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter, float]]:
    """Return A, B and their scale for every adapted weight, by the name that the weight has in ``module``."""
    by_weight = {}
    for name, layer in _layers(module):
        down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        by_weight[f"{name}.base_layer.weight"] = (down, up, float(layer.scaling[_NAME]))
    return by_weight


def config(module: nn.Module) -> AdapterConfig | None:
    """Return rank, alpha and layers of a module's adapters; None without adapters."""
    layers = dict(_layers(module))
    if not layers:
        return None
    first = next(iter(layers.values()))
    return AdapterConfig(
        r=first.r[_NAME],
        lora_alpha=first.lora_alpha[_NAME],
        target_modules=tuple(sorted({name.rpartition(".")[2] for name in layers})),
    )


class Rounding:
    """Adds up how much of what adapters change is left once merged weights are rounded to their dtype.

    An element of bfloat16 has 8 significant bits: one that is changed by less than half a unit in its last place rounds back to what it was.
    """

    def __init__(self) -> None:
        self.sums = (0.0, 0.0)  # <rounded - W, change>, <change, change>

    def add(self, weight: Tensor, change: Tensor, rounded: Tensor) -> None:
        left = rounded.float() - weight.float()
        self.sums = self.sums[0] + float((left * change).sum()), self.sums[1] + float(change.square().sum())


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float, rounding: Rounding | None = None) -> Tensor:
    """Return ``W + scale B A`` in W's dtype, computed in float32; counted in ``rounding``, if set."""
    change = scale * (up.float() @ down.float())
    rounded = (weight.float() + change).to(weight.dtype)
    if rounding is not None:
        rounding.add(weight, change, rounded)
    return rounded


@contextlib.contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Return a context in which the module computes without adapters.

    peft's switch also disables gradients, which breaks the hooks that shard them. Adapters that ZeRO 3 has divided are computed, without
    dropout, and multiplied by 0: DeepSpeed fetches parameters ahead only while modules are called in the order that it recorded.
    """
    layers = [layer for _, layer in _layers(module)]
    divided = [layer for layer in layers if hasattr(layer.lora_A[_NAME].weight, "ds_id")]
    kept = [(layer, layer.scaling[_NAME], layer.lora_dropout[_NAME].training) for layer in divided]
    for layer in layers:
        layer._disable_adapters = True
    for layer in divided:
        layer._disable_adapters, layer.scaling[_NAME] = False, 0.0
        layer.lora_dropout[_NAME].eval()
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        for layer, scale, trains in kept:
            layer.scaling[_NAME] = scale
            layer.lora_dropout[_NAME].train(trains)


def parts_of(layer: Any) -> Parts | None:
    """Return the parts of an adapted layer; None for a layer without an adapter."""
    if not hasattr(layer, "lora_A"):
        return None
    up = None if layer._disable_adapters else layer.lora_B[_NAME]
    down, dropout = layer.lora_A[_NAME], layer.lora_dropout[_NAME]
    return Parts(layer.base_layer, lambda values: down(dropout(values)), up, float(layer.scaling[_NAME]))


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer
