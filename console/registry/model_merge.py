"""Merge several models of the same shape into one model folder, tensor by tensor (``penstock model merge``).

The methods are pure, in float32, on flat arrays of equal length.

| method            | formula                                                                                  | source           |
|-------------------|------------------------------------------------------------------------------------------|------------------|
| `linear`          | Σ wᵢ xᵢ / Σ wᵢ                                                                           | arXiv 2203.05482 |
| `slerp`           | on the arc between two tensors, at ``t``; on the line where they are nearly parallel      | Shoemake 1985    |
| `task_arithmetic` | b + λ Σ wᵢ (xᵢ - b)                                                                      | arXiv 2212.04089 |
| `ties`            | b + λ · mean of the largest changes whose sign is the elected one                        | arXiv 2306.01708 |
| `dare`            | b + λ Σ wᵢ mᵢ (xᵢ - b) / density, mᵢ a random mask that keeps ``density`` of the changes | arXiv 2311.03099 |

Safetensors files are read and written with numpy alone: bfloat16 is unpacked to float32 and rounded back. A file is mapped, not
loaded: memory holds one tensor of each model at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from penstock.protocol import model_folder
from penstock.protocol.errors import ConfigError, UnsupportedModel
from penstock.protocol.files import new_folder

Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare"]
METHODS: tuple[Method, ...] = get_args(Method)
_NEARLY_PARALLEL = 0.9995
_ON_A_BASE = ("task_arithmetic", "ties", "dare")
RECORD = "merge.json"
_WHOLE = {"U8": 1, "I8": 1, "BOOL": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Recipe:
    method: Method
    weights: tuple[float, ...]
    t: float = 0.5  # slerp: 0 the first model, 1 the second
    density: float = 0.5  # share of the changes that ties and dare keep
    scale: float = 1.0  # λ
    seed: int = 0  # of dare's masks

    def check(self, *, has_base: bool) -> None:
        if len(self.weights) < 2:
            raise ConfigError("a merge needs at least two models")
        if self.method == "slerp" and len(self.weights) != 2:
            raise ConfigError(f"slerp merges two models, got {len(self.weights)}; use linear for more")
        if has_base != (self.method in _ON_A_BASE):
            raise ConfigError(
                f"{self.method} adds changes to a base model: name it with --base"
                if not has_base
                else f"{self.method} has no base model: leave out --base, or use {', '.join(_ON_A_BASE)}"
            )
        if not 0.0 < self.density <= 1.0 or not 0.0 <= self.t <= 1.0:
            raise ConfigError(f"density {self.density:g} must be above 0 and at most 1, t {self.t:g} between 0 and 1")
        if self.method == "linear" and abs(sum(self.weights)) < 1e-6:
            raise ConfigError("the weights of a linear merge add up to 0; give others")


def merge(recipe: Recipe, models: Sequence[Float32s], base: Float32s | None, name: str) -> Float32s:
    if recipe.method == "linear":
        return _sum(models, recipe.weights) / np.float32(sum(recipe.weights))
    if recipe.method == "slerp":
        return slerp(models[0], models[1], recipe.t)
    assert base is not None
    changes = [model - base for model in models]
    if recipe.method == "ties":
        return np.add(base, ties(changes, recipe.weights, recipe.density) * np.float32(recipe.scale), dtype=np.float32)
    if recipe.method == "dare":
        changes = [dare(change, recipe.density, f"{recipe.seed} {n} {name}") for n, change in enumerate(changes)]
    return np.add(base, _sum(changes, recipe.weights) * np.float32(recipe.scale), dtype=np.float32)


def slerp(first: Float32s, second: Float32s, t: float) -> Float32s:
    """Return the point at ``t`` of the arc between two tensors, which are taken as vectors."""
    lengths = float(np.linalg.norm(first)), float(np.linalg.norm(second))
    cosine = float(np.dot(first, second)) / (lengths[0] * lengths[1]) if min(lengths) > 0.0 else 1.0
    if abs(cosine) > _NEARLY_PARALLEL:
        return _sum((first, second), (1.0 - t, t))
    angle = float(np.arccos(cosine))
    return _sum((first, second), (np.sin((1.0 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)))


def ties(changes: Sequence[Float32s], weights: Sequence[float], density: float) -> Float32s:
    """Trim each change to its largest entries, elect a sign for each entry, and average the changes that have it."""
    trimmed = [_largest(change, density) * np.float32(weight) for change, weight in zip(changes, weights, strict=True)]
    elected = np.sign(_sum(trimmed, [1.0] * len(trimmed)))
    total, share = np.zeros_like(changes[0]), np.zeros_like(changes[0])
    for change, weight in zip(trimmed, weights, strict=True):
        agrees = (np.sign(change) == elected) & (change != 0)
        total += np.where(agrees, change, np.float32(0))
        share += np.where(agrees, np.float32(abs(weight)), np.float32(0))
    return np.divide(total, share, out=np.zeros_like(total), where=share > 0)


def dare(change: Float32s, density: float, seed: str) -> Float32s:
    """Keep each entry with probability ``density`` and scale it up, so that the expected change stays."""
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    kept = generator.random(len(change), np.float32) < density
    return np.where(kept, change / np.float32(density), np.float32(0))


def _largest(change: Float32s, density: float) -> Float32s:
    keep = max(1, round(density * len(change)))
    if keep >= len(change):
        return change
    sizes = np.abs(change)
    threshold = np.partition(sizes, len(change) - keep)[len(change) - keep]
    return np.where(sizes >= threshold, change, np.float32(0))


def _sum(arrays: Sequence[Float32s], weights: Sequence[float]) -> Float32s:
    total = np.zeros_like(arrays[0])
    for array, weight in zip(arrays, weights, strict=True):
        total += array * np.float32(weight)
    return total


def parse_weights(text: str | None, count: int) -> tuple[float, ...]:
    """Return a weight for each of ``count`` models from ``0.3,0.7``, 1 each without; raises ConfigError."""
    if text is None:
        return (1.0,) * count
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--weights {text!r}: expected numbers, comma-separated") from None
    if len(weights) != count or not np.isfinite(weights).all():
        raise ConfigError(f"--weights {text!r}: expected {count} numbers, one for each model")
    return weights


def merge_folders(models: Sequence[Path], base: Path | None, to: Path, recipe: Recipe) -> int:
    """Write the merged model, whole or not at all; returns the number of tensors.

    The first model gives the shards, the dtypes, the config and the tokenizer. Raises ConfigError when models differ in
    tensors or shapes, when a merged tensor is not finite, or when the folder exists.
    """
    recipe.check(has_base=base is not None)
    if to.exists():
        raise ConfigError(f"{to} exists; name another folder, or remove it")
    opened = [open_model(folder) for folder in models]
    opened_base = None if base is None else open_model(base)
    for folder, model in zip(models[1:], opened[1:], strict=True):
        _check_same(models[0], opened[0], folder, model)
    if base is not None and opened_base is not None:
        _check_same(models[0], opened[0], base, opened_base)
    with new_folder(to) as partial:
        for file in weight_files(models[0]):
            tensors = read_header(file)
            write_file(partial / file.name, tensors, _merged(tensors, opened, opened_base, recipe))
        copy_rest(models[0], partial)
        (partial / RECORD).write_text(json.dumps(_record(models, base, recipe), indent=1) + "\n", encoding="utf-8")
    return len(opened[0])


def _merged(
    tensors: Mapping[str, StoredTensor],
    models: Sequence[Mapping[str, StoredTensor]],
    base: Mapping[str, StoredTensor] | None,
    recipe: Recipe,
) -> Iterator[bytes]:
    for name, tensor in tensors.items():
        if not tensor.is_float:  # such as position ids
            if any(not np.array_equal(tensor.raw(), other[name].raw()) for other in models[1:]):
                raise ConfigError(
                    f"tensor {name} has whole numbers that differ between the models; they cannot be merged"
                )
            yield tensor.raw().tobytes()
            continue
        values = [other[name].values() for other in models]
        merged = merge(recipe, values, None if base is None else base[name].values(), name)
        if not np.isfinite(merged).all():
            raise ConfigError(f"tensor {name} of the merged model has values that are not finite; check the models")
        yield packed(merged, tensor.dtype)


def _check_same(
    first: Path, tensors: Mapping[str, StoredTensor], folder: Path, others: Mapping[str, StoredTensor]
) -> None:
    differing = sorted(set(tensors) ^ set(others))
    if differing:
        where = first if differing[0] in tensors else folder
        raise ConfigError(
            f"{first} and {folder} differ in {len(differing)} tensors: {differing[0]} is only in {where}; merge models of "
            "one architecture"
        )
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape or tensor.is_float != others[name].is_float:
            raise ConfigError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)} in {first} and {others[name].dtype} "
                f"{list(others[name].shape)} in {folder}; merge models of one architecture"
            )


def copy_rest(folder: Path, to: Path) -> None:
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        if path.is_file() and not path.is_symlink() and path.name != RECORD and not is_weights:
            shutil.copyfile(path, to / path.name)
    assert (to / model_folder.INDEX).exists() == (folder / model_folder.INDEX).exists()


def _record(models: Sequence[Path], base: Path | None, recipe: Recipe) -> dict[str, object]:
    return {
        "method": recipe.method,
        "models": [str(model) for model in models],
        "base": None if base is None else str(base),
        "weights": list(recipe.weights),
        "t": recipe.t,
        "density": recipe.density,
        "scale": recipe.scale,
        "seed": recipe.seed,
    }


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; ``start`` and ``end`` are offsets in the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS

    def raw(self) -> npt.NDArray[np.uint8]:
        if self.end == self.start:
            return np.zeros(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", offset=self.start, shape=(self.end - self.start,))

    def values(self) -> Float32s:
        raw = self.raw()
        if self.dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return raw.view({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[self.dtype]).astype(np.float32)


def packed(values: Float32s, dtype: str) -> bytes:
    """Return float32 values as the bytes of a dtype, rounded to nearest, ties to even."""
    if dtype != "BF16":
        return values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).tobytes()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2").tobytes()


def open_model(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model folder by name. Raises ConfigError for a folder without whole safetensors files."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ConfigError(
                    f"{folder}: tensor {name} is in {tensors[name].file.name} and in {file.name}; remove one file"
                )
            tensors[name] = tensor
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name, in the order of their bytes; raises ConfigError for a damaged file."""
    try:
        tensors = dict(_tensors(file, *model_folder.read_header(file)))
    except (ValueError, UnsupportedModel) as err:
        raise ConfigError(f"{file} is no whole safetensors file ({err}); restore it") from None
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def weight_files(folder: Path) -> list[Path]:
    try:
        model_folder.refuse_adapter(folder, "the model")
        return model_folder.weight_files(folder)
    except UnsupportedModel as err:
        raise ConfigError(f"{folder} is no model folder with safetensors: {err}") from None


def _tensors(file: Path, document: Mapping[str, Any], begin: int) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in document.items():
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = (begin + offset for offset in entry["data_offsets"])
        width = {**_FLOATS, **_WHOLE}.get(dtype)
        if width is None:
            raise ValueError(f"tensor {name} has dtype {dtype}, which is not known here")
        if end - start != math.prod(shape) * width:
            raise ValueError(f"tensor {name} has other offsets than its shape needs")
        yield name, StoredTensor(file, name, dtype, shape, start, end)


def write_file(path: Path, like: Mapping[str, StoredTensor], data: Iterator[bytes]) -> None:
    """Write a file with the tensors of another one, their bytes in the same order, each taken when it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in like.items():
        end = at + tensor.end - tensor.start
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for chunk in data:
            file.write(chunk)
