"""Check before every update that a folder holds complete, finite weights of the same model, or a PEFT adapter for the base weights.

SGLang 0.5.23 crashes on a truncated file or a tensor of another shape, keeps an old tensor where one is missing, and
generates garbage from a NaN, all under the new version's number. So every folder is compared with the first one that
this worker loaded, and every value is checked to be finite, before a server loads it. Reading takes about 1 s for 2 GB
of bfloat16 and core, several files at once, while generation continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from penstock.protocol.errors import MalformedWeights, UnsupportedModel
from penstock.protocol.model_folder import read_header
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterConfig,
    check_served,
    pair_tensors,
)
from penstock.protocol.weights.layout import SAFETENSORS_DTYPES
from penstock.protocol.weights.version_reader import PARALLEL_BUCKETS
from penstock.rollout_service.errors import WeightsNotApplied, WeightsUnusable

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


class WeightsCheck:
    """Names, dtypes and shapes of a worker's model, and the check against them. Blocking: reads whole folders."""

    def __init__(self) -> None:
        self._standard: dict[str, Shape] | None = None
        self.passed: PolicyVersion | None = None  # whose folder need not be read

    def check(self, folder: Path, version: PolicyVersion) -> None:
        if version == self.passed:
            return
        try:
            shapes = _read_folder(folder)
        except (OSError, ValueError, KeyError, TypeError, UnsupportedModel) as err:
            raise WeightsUnusable(f"version {version}: {folder} is not a readable set of weights ({err})") from None
        if self._standard is not None and shapes != self._standard:
            raise WeightsUnusable(f"version {version}: {_difference(shapes, self._standard)}")
        self._standard = shapes
        self.passed = version

    def passes(self, version: PolicyVersion, changed: Iterable[tuple[str, np.ndarray]]) -> bool:
        """Return True if a version has finite words where it differs from a base that has passed: its folder needs no check then.

        ``changed`` are dtypes, as a layout names them, and words as unsigned integers.
        """
        is_finite = all(_is_finite(words, *_BITS[dtype]) for dtype, words in changed if dtype in _BITS)
        if is_finite:
            self.passed = version
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


def check_adapter(folder: Path, version: PolicyVersion, base: Path) -> None:
    try:
        config = AdapterConfig.from_peft(folder)
        if config.use_rslora:
            raise MalformedWeights(f"{ADAPTER_CONFIG}: use_rslora = True is not computed by SGLang")
        check_served(config.target_modules, f"{ADAPTER_CONFIG}: target_modules")
        shapes = {name: sizes for name, (_, sizes) in read_file(folder / ADAPTER_WEIGHTS).items()}
        weights: dict[str, tuple[int, ...]] = {}
        for file in sorted(base.glob("*.safetensors")):
            weights |= {name: tuple(entry["shape"]) for name, entry in read_header(file)[0].items()}
        pair_tensors(config, shapes, weights)
    except (OSError, ValueError, KeyError, TypeError, MalformedWeights, UnsupportedModel) as err:
        raise WeightsNotApplied(f"adapter of version {version} in {folder}: {err}") from None
