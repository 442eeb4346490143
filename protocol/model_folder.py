"""Checks of a model folder from outside, before transformers reads it; imports no torch.

transformers asks on a terminal whether to run a folder's own code, unpickles files, follows names out of the folder,
loads what ``adapter_config.json`` names from elsewhere. All of it is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.protocol.errors import UnsupportedModel
from penstock.protocol.files import json_value, open_regular, read_regular

INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors
MAX_JSON_BYTES = 256 * 1024**2
_MAX_NUMBER = 2**31
_MAX_VALUES = 200_000
_MAX_LAYERS = 10_000
_LAYERS = re.compile(r"(^|\.)n[a-z_]*layers?$")  # a number of them; others are numbered from the end
_FLOATS = frozenset({"F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"})


def check_folder(folder: Path, check_config: Callable[[dict[str, Any]], None] = lambda config: None) -> None:
    """Raise UnsupportedModel for a folder that transformers must not read; ``check_config`` sees its config first."""
    refuse_adapter(folder)
    config = read_object(folder / "config.json")
    check_config(config)
    check_numbers(folder / "config.json", config)
    for path in weight_files(folder):
        _check_header(path)


def refuse_adapter(folder: Path, key: str = "model.path") -> None:
    """Raise UnsupportedModel for the folder of a PEFT adapter, where a model's is expected; ``key`` names it."""
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(
            f"{key} = {folder} is an adapter (adapter_config.json). To train it further, set model.path to its base "
            f"model and model.lora.path to it; for all else: penstock model merge BASE --adapter {folder} --to MERGED"
        )


def check_numbers(path: Path, config: dict[str, Any]) -> None:
    """Raise UnsupportedModel for numbers that no model has, and for kernels that would be downloaded."""
    for number, (key, value) in enumerate(_leaves(config)):
        if number == _MAX_VALUES:
            raise UnsupportedModel(f"{path}: more than {_MAX_VALUES} values; restore it")
        if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:  # nor NaN
            raise UnsupportedModel(f"{path}: {key} = {value}: expected at most {_MAX_NUMBER}; restore it")
        if _LAYERS.search(key) and isinstance(value, int) and not 0 <= value <= _MAX_LAYERS:
            raise UnsupportedModel(f"{path}: {key} = {value}: expected 0 to {_MAX_LAYERS}; restore it")
        if key.endswith("attn_implementation") and isinstance(value, str) and "/" in value:
            raise UnsupportedModel(f"{path}: {key} = {value}: kernels are not downloaded; remove this key")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a model folder names, all of them in it; raises UnsupportedModel."""
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise UnsupportedModel(
            f"model.path = {folder}: no model.safetensors and no {INDEX}; other formats can contain code and are not "
            "read: save the model again with `save_pretrained` of transformers"
        )
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UnsupportedModel(f"{index}: expected a weight_map; restore the file")
    for name in names.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise UnsupportedModel(
                f"{index}: {str(name)[:80]!r}: expected the name of a safetensors file in this folder"
            )
        if not (folder / name).is_file():
            raise UnsupportedModel(f"{index}: {name} is not in the folder; copy it there")
    return [folder / name for name in sorted(set(names.values()))]


def _check_header(path: Path) -> None:
    for name, entry in read_header(path)[0].items():
        if name.endswith((".weight", ".bias")) and entry["dtype"] not in _FLOATS:
            raise UnsupportedModel(
                f"{path}: {name[:80]} is {entry['dtype'][:80]}: expected floating-point numbers; restore the file"
            )


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return dtype, shape and offsets of a safetensors file's tensors, and where data begin; raises UnsupportedModel.

    The shapes are whole numbers, and the offsets are of bytes that the file has.
    """
    try:
        with open_regular(path, follow=True) as file:
            size, actual = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= min(_MAX_HEADER_BYTES, actual) else b""
    except OSError as err:  # safetensors writes files of mode 0600; a container has another user
        raise UnsupportedModel(f"{path}: not readable ({err.strerror}); let this process's user read it") from None
    try:
        header: dict[str, dict[str, Any]] = json_value(data)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            numbers = (*entry["shape"], begin, end, end - begin)
            if not isinstance(entry["dtype"], str) or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{name[:80]} has no dtype, shape and offsets")
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise UnsupportedModel(
            f"{path}: not a safetensors file (its header of {size} bytes: {str(err)[:200]}); restore the file"
        ) from None
    expected = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if actual < expected:
        raise UnsupportedModel(f"{path}: {actual:,} bytes, its header says {expected:,}: it is cut off; copy it again")
    return header, 8 + size


def read_object(path: Path, limit: int = MAX_JSON_BYTES, *, optional: bool = False) -> dict[str, Any]:
    """Return a JSON object of a file, or an empty one without a file that is ``optional``; raises UnsupportedModel."""
    if optional and not path.is_file():
        return {}
    try:
        if (size := path.stat().st_size) > limit:
            raise UnsupportedModel(f"{path}: {size} bytes, the limit is {limit}; restore the file")
        content = json_value(read_regular(path, limit, follow=True))
    except OSError as err:
        raise UnsupportedModel(f"{path}: not readable ({err.strerror}); restore the file") from None
    except ValueError as err:
        raise UnsupportedModel(f"{path}: not JSON ({err}); restore the file") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path}: expected a JSON object, got {type(content).__name__}; restore the file")
    return content


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value
