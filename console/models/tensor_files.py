"""Read and write safetensors files tensor by tensor, with numpy alone: bfloat16 is unpacked to float32 and rounded back.

A file is mapped, not loaded: memory holds one tensor of each model at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ConfigError

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 1024**2
_WHOLE = {"U8": 1, "I8": 1, "BOOL": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}

Float32s = npt.NDArray[np.float32]


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


def weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index} is not readable; restore it") from None
        files = [folder / Path(str(name)).name for name in names]
    else:
        files = [folder / "model.safetensors"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{folder} is no model folder with safetensors: {missing[0]} is missing; name a folder such as a run's model/, or "
            "write one with `penstock weights export`"
        )
    return files


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name, in the order of their bytes; raises ConfigError for a damaged file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes")
            document = json.loads(opened.read(length))
        found = dict(_tensors(file, document, 8 + length, size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"{file} is no whole safetensors file ({err}); restore it") from None
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def _tensors(file: Path, document: Mapping[str, Any], begin: int, size: int) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in document.items():
        if name == "__metadata__":
            continue
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, end = (begin + int(offset) for offset in entry["data_offsets"])
        width = {**_FLOATS, **_WHOLE}.get(dtype)
        if width is None:
            raise ValueError(f"tensor {name} has dtype {dtype}, which is not known here")
        if not begin <= start <= end <= size or end - start != math.prod(shape) * width or min(shape, default=0) < 0:
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
        for one in data:
            file.write(one)
