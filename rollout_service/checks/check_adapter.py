"""Check before every load that a folder holds a PEFT adapter for the base weights: its configuration, and two tensors for every layer it names.

A layer's weight W [out, in] computes as ``W + (lora_alpha / r) B A`` with A [r, in] and B [out, r] (LoRA, arXiv 2106.09685). SGLang
0.5.23 reads ``r``, ``lora_alpha`` and ``target_modules`` and ignores all other options of PEFT; it crashes at the first request when a
shape is wrong, generates garbage from a NaN, and silently ignores tensors that it has no name for. All of these are refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, factor_names
from penstock.rollout_service.checks.check_weights import read_file, read_header
from penstock.rollout_service.errors import AdapterUnfit, WeightsNotApplied

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # tensor name → sizes

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_NOT_LAYERS = {"lm_head", "embed_tokens"}  # what "all-linear" leaves out, as PEFT does

# Target → those that must be targets too.
_TOGETHER = {
    "q_proj": {"v_proj"},
    "k_proj": {"q_proj", "v_proj"},
    "v_proj": {"q_proj"},
    "up_proj": {"gate_proj"},
}

# Other options of PEFT → the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
    "layers_to_transform": ([], None),
    "exclude_modules": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of ``adapter_config.json`` that engines compute with."""

    rank: int
    scale: float  # lora_alpha / rank
    targets: frozenset[str] | None  # last words of the adapted layers' names; None: every linear layer


@dataclass(frozen=True, slots=True)
class Pair:
    down: str  # A [r, in]
    up: str  # B [out, r]


def read_config(raw: Any) -> AdapterConfig:
    """Read the object of ``adapter_config.json``; raises AdapterUnfit, naming what does not fit."""
    if not isinstance(raw, dict) or str(raw.get("peft_type", "")).lower() != "lora":
        raise AdapterUnfit(f"{ADAPTER_CONFIG} does not describe a LoRA adapter (peft_type)")
    rank, alpha, targets = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterUnfit(f"{ADAPTER_CONFIG}: r is {rank!r}, expected a whole number above 0")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise AdapterUnfit(f"{ADAPTER_CONFIG}: lora_alpha is {alpha!r}, expected a finite number")
    for name, neutral in _NEUTRAL.items():
        if raw.get(name) not in neutral:
            raise AdapterUnfit(f"{ADAPTER_CONFIG}: {name} = {raw[name]!r} is not computed by every engine")
    if targets == "all-linear":
        return AdapterConfig(rank, alpha / rank, None)
    if not isinstance(targets, list) or not targets or not all(map(_is_word, targets)):
        raise AdapterUnfit(
            f"{ADAPTER_CONFIG}: target_modules is {targets!r}, expected 'all-linear' or last words of layers' names, such as "
            "['q_proj', 'v_proj']: every layer of that name is adapted"
        )
    for word, partners in _TOGETHER.items():
        if word in targets and not partners <= set(targets):
            raise AdapterUnfit(
                f"{ADAPTER_CONFIG}: target_modules has {word} without {' and '.join(sorted(partners - set(targets)))}: SGLang "
                "fuses them and crashes; adapt all of them, or none"
            )
    return AdapterConfig(rank, alpha / rank, frozenset(targets))


def pair_tensors(config: AdapterConfig, found: Shapes, weights: Shapes) -> dict[str, Pair]:
    """Return the tensors of every adapted layer: the layer's name in the model → its pair.

    ``found`` are the adapter's tensors, ``weights`` the model's by their Hugging Face names. Raises AdapterUnfit
    for a layer whose tensors are missing, a tensor of no layer, and shapes that fit neither the rank nor the weight.
    """
    adapted = _adapted_layers(config, weights)
    pairs = {layer: Pair(*factor_names(layer)) for layer in adapted}
    expected = {pair.down: (config.rank, adapted[layer][1]) for layer, pair in pairs.items()}
    expected |= {pair.up: (adapted[layer][0], config.rank) for layer, pair in pairs.items()}
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise AdapterUnfit(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if unknown:
        reason = "adapts no layer that target_modules names" if _TENSOR.fullmatch(unknown[0]) else "is none of LoRA's"
        raise AdapterUnfit(f"{len(unknown)} tensors are unknown, such as {unknown[0]}, which {reason}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise AdapterUnfit(f"{name} has shape {tuple(found[name])}, expected {shape}")
    return pairs


def _adapted_layers(config: AdapterConfig, weights: Shapes) -> dict[str, tuple[int, ...]]:
    layers = {
        name.removesuffix(".weight"): tuple(shape)
        for name, shape in weights.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    words = {layer: layer.rpartition(".")[2] for layer in layers}
    targets = frozenset(words.values()) - _NOT_LAYERS if config.targets is None else config.targets
    if tables := sorted(targets & _NOT_LAYERS):
        raise AdapterUnfit(f"target_modules names {tables[0]}, which is not computed by every engine")
    if idle := sorted(targets - set(words.values())):
        raise AdapterUnfit(f"target_modules names {idle[0]}, which the model does not have")
    return {layer: shape for layer, shape in layers.items() if words[layer] in targets}


def _is_word(target: object) -> bool:
    return isinstance(target, str) and target.isidentifier()


def check_adapter(folder: Path, version: PolicyVersion, base: Path) -> None:
    """Raise WeightsNotApplied for an adapter that is incomplete, not finite, or does not fit the model in ``base``."""
    try:
        config = read_config(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")))
        shapes = {name: sizes for name, (_, sizes) in read_file(folder / ADAPTER_WEIGHTS).items()}
        weights: dict[str, tuple[int, ...]] = {}
        for file in sorted(base.glob("*.safetensors")):
            weights |= {name: tuple(entry["shape"]) for name, entry in read_header(file)[0].items()}
        pair_tensors(config, shapes, weights)
    except (OSError, ValueError, KeyError, TypeError, AdapterUnfit) as err:
        raise WeightsNotApplied(f"adapter of version {version} in {folder}: {err}") from None
