"""Merge a PEFT adapter into its base model, exactly, tensor by tensor and without torch (``penstock model merge BASE --adapter FOLDER``).

A weight W [out, in] becomes ``W + s B A`` in float32, and with DoRA (arXiv 2402.09353) each of its rows is scaled to the norm m. Supported options
of ``adapter_config.json``: ``r`` and ``lora_alpha`` with their patterns, ``use_rslora`` (s = alpha / sqrt(r)), ``use_dora``, ``fan_in_fan_out``,
``bias``, ``modules_to_save``, adapters of embeddings and of some layers. Any other option that changes the model is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.console.registry import model_merge
from penstock.console.registry.model_merge import Float32s, StoredTensor
from penstock.protocol.errors import ConfigError, MalformedWeights, UnsupportedModel
from penstock.protocol.files import new_folder
from penstock.protocol.model_folder import read_object
from penstock.protocol.weights.adapter_format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MAX_CONFIG_BYTES,
    AdapterConfig,
    check_options,
)

_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(?P<weight>\.weight)?")
_TABLES = frozenset({"lm_head", "embed_out", "embed_tokens", "wte", "word_embeddings", "embed_in"})
_MERGED = frozenset({
    "bias", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "modules_to_save",
    "exclude_modules",
})  # fmt: skip


class Options:
    """What an ``adapter_config.json`` says of each layer; raises MalformedWeights."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        check_options(fields, "is not merged here; merge it with peft's merge_and_unload", _MERGED)
        general = {name: fields.get(name) for name in ("r", "lora_alpha")} | {
            "use_rslora": fields.get("use_rslora") or False
        }
        self._config = AdapterConfig.of({**general, "target_modules": ["any"]})
        self._patterns = [_patterns(fields, name) for name in ("rank_pattern", "alpha_pattern")]
        self.use_dora, self.transposed = (fields.get(name) is True for name in ("use_dora", "fan_in_fan_out"))
        self.has_bias = fields.get("bias") not in (None, "none")
        self.saved = tuple(f".{name}" for name in fields.get("modules_to_save") or ())
        leaves_out = any(fields.get(name) not in (None, []) for name in ("layers_to_transform", "exclude_modules"))
        named = fields.get("target_modules")
        # Every layer whose name ends so is adapted.
        self.all_layers: list[str] = named if isinstance(named, list) and not leaves_out else []

    def of(self, layer: str) -> tuple[int, float]:
        """Return rank and scale of a layer: those of the first pattern that it ends with."""
        values = [
            next((value for name, value in pattern.items() if f"^.{layer}".endswith(name)), None)
            for pattern in self._patterns
        ]
        given = {name: value for name, value in zip(("r", "lora_alpha"), values, strict=True) if value is not None}
        config = AdapterConfig.of({**self._config.model_dump(), **given})
        return config.r, config.scale


def _patterns(fields: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the values of a pattern by the end of ``^.<layer>``; peft's are regular expressions, of which only names are read."""
    patterns = fields.get(option) or {}
    plain = {key.replace("\\.", "."): value for key, value in patterns.items()}
    if wild := [key for key in plain if not re.fullmatch(r"\^?[\w.]+", key)]:
        raise MalformedWeights(
            f"{ADAPTER_CONFIG}: {option} has {wild[0][:80]!r}, expected ends of layers' names; merge it with peft"
        )
    return {f"^.{key[1:]}" if key.startswith("^") else f".{key}": value for key, value in plain.items()}


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter does to one weight: ``scale`` B A is added, in the weight's own orientation or ``transposed``."""

    down: StoredTensor
    up: StoredTensor
    scale: float
    transposed: bool
    magnitude: StoredTensor | None = None  # norms of the rows

    def applied(self, weight: Float32s) -> Float32s:
        rows = weight.T if self.transposed else weight
        rows = rows + np.float32(self.scale) * (_matrix(self.up) @ _matrix(self.down))
        if self.magnitude is not None:
            rows = rows * (self.magnitude.values() / np.linalg.norm(rows, axis=1))[:, None]
        return np.ascontiguousarray(rows.T if self.transposed else rows, dtype=np.float32)


def merge_adapter(base: Path, adapter: Path, to: Path) -> int:
    """Write the merged model, whole or not at all, with the dtypes and files of its base; returns the number of changed tensors.

    Raises ConfigError, naming the option or the tensor, for an adapter that is not merged exactly or is of another base.
    """
    if to.exists():
        raise ConfigError(f"{to} exists; name another folder, or remove it")
    weights = model_merge.open_model(base)
    try:
        config = read_object(adapter / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
        changes, replaced = _read(adapter, Options(config), weights, is_tied=_is_tied(base, weights))
    except (MalformedWeights, UnsupportedModel) as err:
        raise ConfigError(f"{adapter} cannot be merged into {base}: {err}") from None
    with new_folder(to) as partial:
        for file in model_merge.weight_files(base):
            tensors = model_merge.read_header(file)
            model_merge.write_file(partial / file.name, tensors, _merged(tensors, changes, replaced))
        model_merge.copy_rest(base, partial)
        record = {"method": "adapter", "base": str(base), "adapter": str(adapter)}
        (partial / model_merge.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return len(changes) + len(replaced)


def _merged(
    tensors: Mapping[str, StoredTensor], changes: Mapping[str, Change], replaced: Mapping[str, StoredTensor]
) -> Iterator[bytes]:
    for name, tensor in tensors.items():
        if name in replaced:
            yield model_merge.packed(replaced[name].values(), tensor.dtype)
        elif name in changes:
            yield model_merge.packed(changes[name].applied(_matrix(tensor)).reshape(-1), tensor.dtype)
        else:
            yield tensor.raw().tobytes()


def _read(
    adapter: Path, options: Options, weights: Mapping[str, StoredTensor], *, is_tied: bool
) -> tuple[dict[str, Change], dict[str, StoredTensor]]:
    """Return the changes and the whole tensors of an adapter by the name of the weight; raises MalformedWeights."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    replaced: dict[str, StoredTensor] = {}
    for name, tensor in model_merge.read_header(adapter / ADAPTER_WEIGHTS).items():
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        module, _, kind = own.rpartition(".")
        if not tensor.is_float:
            raise MalformedWeights(f"{name} has dtype {tensor.dtype}, expected floating-point numbers")
        if not np.isfinite(tensor.values()).all():
            raise MalformedWeights(f"{name} has a value that is not finite")
        match, is_saved = _FACTOR.fullmatch(own), f".{module}".endswith(options.saved)
        word = (match["layer"] if match else module).rpartition(".")[2]
        if is_tied and word in _TABLES and (match or is_saved or ".base_layer." in name):
            raise MalformedWeights(f"{name} is of {word}, which is embedding and head at once (tie_word_embeddings)")
        if match:
            parts.setdefault(match["layer"], {})[match["part"]] = tensor
        elif is_saved or (kind == "bias" and options.has_bias):
            replaced[own] = tensor
            _check_shape(name, tensor.shape, weights[own].shape if own in weights else None)
        # peft also saves tables that it left as they were.
        elif own not in weights or not np.array_equal(_matrix(tensor), _matrix(weights[own])):
            raise MalformedWeights(
                f"{name[:200]}: {ADAPTER_CONFIG} does not account for this tensor, and it differs from the base model's"
            )
    changes = {f"{layer}.weight": _change(layer, found, options, weights) for layer, found in parts.items()}
    for target in options.all_layers:
        if left := [w for w in weights if f".{w}".endswith(f".{target}.weight") and w not in {**changes, **replaced}]:
            raise MalformedWeights(f"it has no tensors for {left[0]}, which target_modules names")
    return changes, replaced


def _change(
    layer: str, found: dict[str, StoredTensor], options: Options, weights: Mapping[str, StoredTensor]
) -> Change:
    is_table = "embedding_A" in found
    down, up = (found.pop(f"embedding_{part}" if is_table else part, None) for part in "AB")
    magnitude = found.pop("magnitude_vector", None)
    if down is None or up is None or found or (magnitude is not None) != options.use_dora or (is_table and magnitude):
        raise MalformedWeights(f"{layer}: expected the tensors A, B{', magnitude' * options.use_dora}")
    rank, scale = options.of(layer)
    transposed = is_table or options.transposed
    size = weights[f"{layer}.weight"].shape if f"{layer}.weight" in weights else None
    if size is None or len(size) != 2:
        shape = "it has no such weight" if size is None else f"its shape is {size}, expected two dimensions"
        raise MalformedWeights(f"the adapter changes {layer} of the base, and {shape}")
    rows, columns = reversed(size) if transposed else size
    for part, tensor, expected in (
        ("A", down, (rank, columns)),
        ("B", up, (rows, rank)),
        ("magnitude", magnitude, (rows,)),
    ):
        if tensor is not None:
            _check_shape(f"{part} of {layer}", tensor.shape, expected)
    return Change(down, up, scale, transposed, magnitude)


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    if expected is None:
        raise MalformedWeights(f"{name}: the base has no tensor of this name")
    if shape != expected:
        raise MalformedWeights(f"{name} has shape {shape}, expected {expected}")


def _is_tied(base: Path, weights: Mapping[str, StoredTensor]) -> bool:
    config = read_object(base / "config.json")
    parts = (config, config.get("text_config"))
    is_said = any(part.get("tie_word_embeddings") is True for part in parts if isinstance(part, dict))
    return is_said or not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in weights)


def _matrix(tensor: StoredTensor) -> Float32s:
    return tensor.values().reshape(tensor.shape)
