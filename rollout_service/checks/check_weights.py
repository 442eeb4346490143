"""Check before every update that a folder holds complete, finite weights of the same model, or a PEFT adapter for the base weights.

SGLang 0.5.23 crashes on a truncated file or a tensor of another shape, keeps an old tensor where one is missing, and
generates garbage from a NaN, all under the new version's number. So every folder is compared with the first one that
this worker loaded, and every value is checked to be finite, before a server loads it. Reading takes about 1 s for 2 GB
of bfloat16 and core, several files at once, while generation continues.

A layer's weight W [out, in] computes as ``W + (lora_alpha / r) B A`` with A [r, in] and B [out, r] (LoRA, arXiv 2106.09685). SGLang reads ``r``,
``lora_alpha`` and ``target_modules`` and ignores all other options of PEFT; it crashes at the first request when a shape is wrong, and
silently ignores tensors that it has no name for. So an adapter has two tensors for every layer it names, and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from penstock.protocol.errors import UnsupportedModel
from penstock.protocol.model_folder import read_header, read_object
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, factor_names
from penstock.protocol.weights.layout import SAFETENSORS_DTYPES
from penstock.protocol.weights.version_reader import PARALLEL_BUCKETS
from penstock.rollout_service.errors import AdapterUnfit, WeightsNotApplied, WeightsUnusable

Shape: TypeAlias = tuple[str, tuple[int, ...]]  # dtype by its safetensors code, sizes
_CHUNK = 4 * 1024 * 1024  # values checked together

# safetensors code → word, and the bits that are all set in an infinity or NaN (in float8_e4m3, in a NaN)
_FLOATS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F),
}
_BITS = {SAFETENSORS_DTYPES[code][0]: bits for code, bits in _FLOATS.items()}  # by a layout's name of the dtype
_SIZES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # tensor name → sizes
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_NOT_LAYERS = {"lm_head", "embed_tokens"}  # what "all-linear" leaves out, as PEFT does
# Target → those that must be targets too.
_TOGETHER = {"q_proj": {"v_proj"}, "k_proj": {"q_proj", "v_proj"}, "v_proj": {"q_proj"}, "up_proj": {"gate_proj"}}
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


class WeightsCheck:
    """Names, dtypes and shapes of a worker's model, and the check against them. Blocking: reads whole folders."""

    def __init__(self) -> None:
        self._standard: dict[str, Shape] | None = None
        self._passed: PolicyVersion | None = None

    def check(self, folder: Path, version: PolicyVersion) -> None:
        if version == self._passed:
            return
        try:
            shapes = _read_folder(folder)
        except (OSError, ValueError, KeyError, TypeError, UnsupportedModel) as err:
            raise WeightsUnusable(f"version {version}: {folder} is not a readable set of weights ({err})") from None
        if self._standard is not None and shapes != self._standard:
            raise WeightsUnusable(f"version {version}: {_difference(shapes, self._standard)}")
        self._standard = shapes
        self._passed = version

    def passes(self, version: PolicyVersion, changed: Iterable[tuple[str, np.ndarray]]) -> bool:
        """Return True if a version has finite words where it differs from a base that has passed: its folder needs no check then.

        ``changed`` are dtypes, as a layout names them, and words as unsigned integers.
        """
        is_finite = all(_is_finite(words, *_BITS[dtype]) for dtype, words in changed if dtype in _BITS)
        if is_finite:
            self._passed = version
        return is_finite


def _read_folder(folder: Path) -> dict[str, Shape]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("no .safetensors file")
    shapes: dict[str, Shape] = {}
    with ThreadPoolExecutor(PARALLEL_BUCKETS, "check") as pool:  # numpy computes without the interpreter's lock
        for found in pool.map(read_file, files):
            for name, shape in found.items():
                if name in shapes:
                    raise ValueError(f"tensor {name} is in two files")
                shapes[name] = shape
    return shapes


def read_file(file: Path) -> dict[str, Shape]:
    header, start = read_header(file)
    data = np.memmap(file, mode="r", offset=start) if file.stat().st_size > start else np.empty(0, np.uint8)
    shapes: dict[str, Shape] = {}
    for name, entry in header.items():
        code, sizes, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        word = np.dtype(_FLOATS[code][0]).itemsize if code in _FLOATS else _SIZES[code]
        if end > len(data) or end - begin != word * math.prod(sizes):
            raise ValueError(f"{file.name} is truncated: {name} ends at byte {end} of {len(data)}")
        if code in _FLOATS:
            _check_finite(name, data[begin:end], *_FLOATS[code])
        shapes[name] = (code, sizes)
    return shapes


def _check_finite(name: str, raw: np.ndarray, word: type[np.unsignedinteger[Any]], mask: int) -> None:
    if not _is_finite(np.frombuffer(raw, dtype=word), word, mask):
        raise ValueError(f"{name} holds a value that is not finite; the training has diverged")


def _is_finite(values: np.ndarray, word: type[np.unsignedinteger[Any]], mask: int) -> bool:
    chunks = (values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK))
    return not any(((chunk & word(mask)) == word(mask)).any() for chunk in chunks)


def _difference(shapes: dict[str, Shape], standard: dict[str, Shape]) -> str:
    missing, unknown = sorted(standard.keys() - shapes.keys()), sorted(shapes.keys() - standard.keys())
    if missing:
        return f"{len(missing)} tensors are missing that earlier versions had, such as {missing[0]}"
    if unknown:
        return f"{len(unknown)} tensors are new that earlier versions had not, such as {unknown[0]}"
    name = next(name for name in sorted(shapes) if shapes[name] != standard[name])
    return f"{name} is {shapes[name]}, in earlier versions {standard[name]}"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    scale: float  # lora_alpha / rank
    targets: frozenset[str] | None  # last words of the adapted layers' names; None: every linear layer


@dataclass(frozen=True, slots=True)
class Pair:
    down: str  # A [r, in]
    up: str  # B [out, r]


def read_config(raw: Any) -> AdapterConfig:
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
    if (
        not isinstance(targets, list)
        or not targets
        or not all(isinstance(target, str) and target.isidentifier() for target in targets)
    ):
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


def pair_tensors(config: AdapterConfig, tensors: Shapes, weights: Shapes) -> dict[str, Pair]:
    """Return the tensors of every adapted layer: the layer's name in the model → its pair.

    ``tensors`` are the adapter's tensors, ``weights`` the model's by their Hugging Face names. Raises AdapterUnfit
    for a layer whose tensors are missing, a tensor of no layer, and shapes that fit neither the rank nor the weight.
    """
    adapted = _adapted_layers(config, weights)
    pairs = {layer: Pair(*factor_names(layer)) for layer in adapted}
    expected = {pair.down: (config.rank, adapted[layer][1]) for layer, pair in pairs.items()}
    expected |= {pair.up: (adapted[layer][0], config.rank) for layer, pair in pairs.items()}
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise AdapterUnfit(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if unknown:
        reason = "adapts no layer that target_modules names" if _TENSOR.fullmatch(unknown[0]) else "is none of LoRA's"
        raise AdapterUnfit(f"{len(unknown)} tensors are unknown, such as {unknown[0]}, which {reason}")
    for name, shape in expected.items():
        if tuple(tensors[name]) != shape:
            raise AdapterUnfit(f"{name} has shape {tuple(tensors[name])}, expected {shape}")
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


def check_adapter(folder: Path, version: PolicyVersion, base: Path) -> None:
    try:
        config = read_config(read_object(folder / ADAPTER_CONFIG))
        shapes = {name: sizes for name, (_, sizes) in read_file(folder / ADAPTER_WEIGHTS).items()}
        weights: dict[str, tuple[int, ...]] = {}
        for file in sorted(base.glob("*.safetensors")):
            weights |= {name: tuple(entry["shape"]) for name, entry in read_header(file)[0].items()}
        pair_tensors(config, shapes, weights)
    except (OSError, ValueError, KeyError, TypeError, AdapterUnfit, UnsupportedModel) as err:
        raise WeightsNotApplied(f"adapter of version {version} in {folder}: {err}") from None
