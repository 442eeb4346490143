"""A low-rank adapter as a version: its files in PEFT's format, its root, and the pairs of factors it adds.

A layer's weight W [out, in] is served as ``W + (lora_alpha / r) B A`` (LoRA, arXiv 2106.09685), A [r, in], B [out, r].
Each version is a folder that engines and `peft` load as it is:

    adapter_config.json            r, lora_alpha, target_modules
    adapter_model.safetensors      base_model.model.<layer>.lora_A.weight, base_model.model.<layer>.lora_B.weight

An adapter from outside may have PEFT's other options, of which SGLang reads none: one that changes what is computed is
refused by name (`from_peft`). It has two tensors for every layer that it names, and nothing else (`pair_tensors`):
SGLang crashes at the first request when a shape is wrong, and ignores tensors that it has no name for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.protocol.errors import MalformedWeights
from penstock.protocol.groups import first_problem
from penstock.protocol.model_folder import read_object
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import TensorDigest, weights_digest

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 64 * 1024
MERGE_ADAPTER = "merge it first: penstock model merge BASE --adapter {adapter} --to MERGED, then model.path = MERGED"
_NAME = "policy@"
_PREFIX = "base_model.model."
_DOWN, _UP, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
ALL_LINEAR = "all-linear"
_NOT_LAYERS = {"lm_head", "embed_tokens"}  # what "all-linear" leaves out, as PEFT does
# Target → those that must be targets too.
_TOGETHER = {"q_proj": {"v_proj"}, "k_proj": {"q_proj", "v_proj"}, "v_proj": {"q_proj"}, "up_proj": {"gate_proj"}}
# Fields of PEFT's configuration that change nothing in a trained adapter, and values of others that do not.
WITHOUT_EFFECT = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "r", "lora_alpha", "target_modules", "use_rslora", "megatron_core", "qalora_group_size",
    "runtime_config", "eva_config", "ensure_weight_tying",
})  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),  # others change the base's weights too
}
_EMPTY: tuple[Any, ...] = (None, False, [], {})
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # tensor name → sizes


class AdapterConfig(BaseModel):
    """The fields of ``adapter_config.json`` that determine the served weights."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    r: int = Field(strict=True, gt=0, le=2**20)
    lora_alpha: float = Field(gt=0, le=1e9)
    target_modules: tuple[str, ...] = Field(min_length=1)
    use_rslora: bool = Field(default=False, strict=True)  # never of a version, whose lora_alpha has the square root

    @property
    def scale(self) -> float:
        """The factor of B A; rank-stabilised (rsLoRA, arXiv 2312.03732) ``lora_alpha / sqrt(r)``."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def to_json(self) -> bytes:
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.r,
            "lora_alpha": int(self.lora_alpha) if self.lora_alpha.is_integer() else self.lora_alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(self.target_modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "inference_mode": True,
        }
        return json.dumps(fields, indent=2).encode()

    @classmethod
    def from_json(cls, data: bytes) -> AdapterConfig:
        """Read a file of `to_json`; raises MalformedWeights.

        Engines and `peft` read more fields: one that `to_json` does not write could change what is served: refused.
        """
        try:
            config = cls.model_validate_json(data)
            fields = json.loads(data, object_pairs_hook=_each_once)
        except ValidationError as err:
            raise MalformedWeights(f"{ADAPTER_CONFIG}: {first_problem(err)}") from None
        written = json.loads(config.to_json()) | {"target_modules": list(config.target_modules)}
        other = [name for name in fields if name not in written or fields[name] != written[name]]
        if other:
            raise MalformedWeights(
                f"{ADAPTER_CONFIG}: {other[0][:40]} = {str(fields[other[0]])[:40]!r} is not what a trainer writes there"
            )
        return config

    @classmethod
    def from_peft(cls, folder: Path) -> AdapterConfig:
        """Read the configuration of an outside adapter; raises MalformedWeights for what is not computed everywhere."""
        fields = read_object(folder / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
        check_options(fields, "is not computed by every engine")
        targets, rslora = fields.get("target_modules"), fields.get("use_rslora") or False
        if targets != ALL_LINEAR and not (
            isinstance(targets, list) and all(isinstance(target, str) and target.isidentifier() for target in targets)
        ):
            raise MalformedWeights(
                f"{ADAPTER_CONFIG}: target_modules is {str(targets)[:80]!r}, expected {ALL_LINEAR!r} or last words of "
                "layers' names, such as ['q_proj', 'v_proj']: every layer of that name is adapted"
            )
        read = {"target_modules": [targets] if targets == ALL_LINEAR else targets, "use_rslora": rslora}
        return cls.of({"r": fields.get("r"), "lora_alpha": fields.get("lora_alpha"), **read})

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AdapterConfig:
        try:
            return cls.model_validate(fields)
        except ValidationError as err:
            raise MalformedWeights(f"{ADAPTER_CONFIG}: {first_problem(err)}") from None


def check_options(fields: Mapping[str, Any], refused: str, offered: Collection[str] = ()) -> None:
    """Raise MalformedWeights for a PEFT configuration of no LoRA, or of an option with an effect not ``offered``."""
    if str(fields.get("peft_type", "")).lower() != "lora":
        raise MalformedWeights(f"{ADAPTER_CONFIG} does not describe a LoRA adapter (peft_type)")
    for name in sorted(fields.keys() - WITHOUT_EFFECT - set(offered)):
        if not any(fields[name] is value or fields[name] == value for value in NEUTRAL.get(name, _EMPTY)):
            raise MalformedWeights(f"{ADAPTER_CONFIG}: {name[:40]} = {str(fields[name])[:60]!r} {refused}")


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise MalformedWeights(f"{ADAPTER_CONFIG}: a field is there twice")
    return fields


def adapter_name(version: PolicyVersion) -> str:
    return f"{_NAME}{version}"


def version_of(name: object) -> PolicyVersion | None:
    """Return the version whose adapter has this name; None for any other name."""
    label = name.removeprefix(_NAME) if isinstance(name, str) and name.startswith(_NAME) else ""
    return PolicyVersion(int(label)) if label.isascii() and label.isdecimal() else None


def factor_names(layer: str) -> tuple[str, str]:
    return published_name(layer + _DOWN), published_name(layer + _UP)


def published_name(name: str) -> str:
    return _PREFIX + name


@dataclass(frozen=True, slots=True)
class Pair:
    down: str  # A [r, in]
    up: str  # B [out, r]


def check_served(targets: Collection[str], where: str) -> None:
    """Raise MalformedWeights for targets that SGLang does not serve: it fuses layers, and crashes without one."""
    for word, partners in _TOGETHER.items():
        if word in targets and not partners <= set(targets):
            raise MalformedWeights(
                f"{where} has {word} without {' and '.join(sorted(partners - set(targets)))}: SGLang fuses them and "
                "crashes; adapt all of them, or none"
            )


def pair_tensors(config: AdapterConfig, tensors: Shapes, weights: Shapes) -> dict[str, Pair]:
    """Return the tensors of every adapted layer: the layer's name in the model → its pair.

    ``tensors`` are the adapter's tensors, ``weights`` the model's by their Hugging Face names. Raises MalformedWeights
    for a layer whose tensors are missing, a tensor of no layer, and shapes that fit neither the rank nor the weight.
    """
    adapted = _adapted_layers(config, weights)
    pairs = {layer: Pair(*factor_names(layer)) for layer in adapted}
    expected = {pair.down: (config.r, adapted[layer][1]) for layer, pair in pairs.items()}
    expected |= {pair.up: (adapted[layer][0], config.r) for layer, pair in pairs.items()}
    check_tensors(tensors, expected)
    return pairs


def check_tensors(tensors: Shapes, expected: Shapes) -> None:
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise MalformedWeights(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if unknown:
        is_factor = unknown[0].startswith(_PREFIX) and unknown[0].endswith((_DOWN, _UP))
        reason = "adapts no layer that target_modules names" if is_factor else "is none of LoRA's"
        raise MalformedWeights(f"{len(unknown)} tensors are unknown, such as {unknown[0][:200]}, which {reason}")
    for name, shape in expected.items():
        if tuple(tensors[name]) != shape:
            raise MalformedWeights(f"{name} has shape {tuple(tensors[name])}, expected {shape}")


def _adapted_layers(config: AdapterConfig, weights: Shapes) -> dict[str, tuple[int, ...]]:
    layers = {
        name.removesuffix(_WEIGHT): tuple(shape)
        for name, shape in weights.items()
        if name.endswith(_WEIGHT) and len(shape) == 2
    }
    words = {layer: layer.rpartition(".")[2] for layer in layers}
    is_all = config.target_modules == (ALL_LINEAR,)
    targets = frozenset(words.values()) - _NOT_LAYERS if is_all else frozenset(config.target_modules)
    if tables := sorted(targets & _NOT_LAYERS):
        raise MalformedWeights(f"target_modules names {tables[0]}, which is not computed by every engine")
    if idle := sorted(targets - set(words.values())):
        raise MalformedWeights(f"target_modules names {idle[0]}, which the model does not have")
    return {layer: shape for layer, shape in layers.items() if words[layer] in targets}


def adapter_digest(base_root: str, config_sha256: str, tensors: Iterable[TensorDigest]) -> str:
    """Return an adapter's root, 64 hex digits: over base, scale and factors, so it identifies the served weights."""
    root = f"adapter\0{base_root}\0{config_sha256}\0{weights_digest(tensors)}\n"
    return hashlib.sha256(root.encode()).hexdigest()
