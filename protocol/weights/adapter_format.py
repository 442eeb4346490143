"""A low-rank adapter as a version: its files in PEFT's format, its root, and the pairs of factors it adds to its base model.

A layer's weight W [out, in] is served as ``W + (lora_alpha / r) B A`` (LoRA, arXiv 2106.09685), A [r, in], B [out, r].
Each version is a folder that engines and `peft` load as it is:

    adapter_config.json            r, lora_alpha, target_modules
    adapter_model.safetensors      base_model.model.<layer>.lora_A.weight, base_model.model.<layer>.lora_B.weight
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.protocol.errors import MalformedWeights
from penstock.protocol.groups import first_problem
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import TensorDigest, weights_digest

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 64 * 1024
_NAME = "policy@"
_PREFIX = "base_model.model."
_DOWN, _UP, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


class AdapterConfig(BaseModel):
    """The fields of ``adapter_config.json`` that determine the served weights."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    r: int = Field(gt=0, le=2**20)
    lora_alpha: float = Field(gt=0, le=1e9)
    target_modules: tuple[str, ...] = Field(min_length=1)

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r

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

        Engines and `peft` read more fields than these: one that `to_json` does not write could change what is served, or name a
        base to download, so it is refused.
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


def factor_pairs(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (the base's weight, A, B) for every adapted layer, by the tensors' names.

    Raises MalformedWeights for a tensor that is no factor, or a factor without its counterpart.
    """
    known = set(names)
    for name in sorted(known):
        if name.startswith(_PREFIX) and name.endswith(_DOWN) and (up := name.removesuffix(_DOWN) + _UP) in known:
            yield name.removeprefix(_PREFIX).removesuffix(_DOWN) + _WEIGHT, name, up
        elif not (name.endswith(_UP) and name.removesuffix(_UP) + _DOWN in known):
            raise MalformedWeights(
                f"tensor {name} is not one of a pair of low-rank factors {_PREFIX}<layer>{_DOWN}, {_UP}"
            )


def adapter_digest(base_root: str, config_sha256: str, tensors: Iterable[TensorDigest]) -> str:
    """Return the root of an adapter, 64 hex digits: it covers base, scale and factors, so it identifies the served weights."""
    root = f"adapter\0{base_root}\0{config_sha256}\0{weights_digest(tensors)}\n"
    return hashlib.sha256(root.encode()).hexdigest()
