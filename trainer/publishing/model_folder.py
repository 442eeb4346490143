"""Writes a Hugging Face model folder: shards of safetensors, their index, and the small files.

The small files are the same in a published version and in the exported model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from penstock.trainer.errors import UnsupportedModel

MAX_SHARD_BYTES = 1024**3
_MAX_SMALL_FILE_BYTES = 64 * 1024**2
_WEIGHTS = re.compile(r".*(\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)|\.index\.json)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Shards = dict[str, dict[str, Tensor]]


def split_shards(tensors: Mapping[str, Tensor], max_bytes: int = MAX_SHARD_BYTES) -> Shards:
    """Return tensors split in order over files of at most ``max_bytes``; a larger tensor has its own file.

    The keys are file names: ``model.safetensors`` for a single file, numbered names for several.
    """
    parts: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and filled + size > max_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def small_files(model_folder: Path, dtype: str, changed: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return all files of a model folder except the weights and their index: config, tokenizer, templates.

    ``config.json`` gets the ``dtype`` of the new weights, and what else has ``changed``. Raises UnsupportedModel for a link out of the folder: what it
    links to would be published.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(model_folder.iterdir())
        if path.is_file()
        and _NAME.fullmatch(path.name)
        and not _WEIGHTS.fullmatch(path.name)
        and path.stat().st_size <= _MAX_SMALL_FILE_BYTES
        and _is_own(path)
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype, **(changed or {})}
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def _is_own(path: Path) -> bool:
    """Return True for a file of the folder, or of the Hugging Face cache that the folder is in; raises UnsupportedModel."""
    target, folder = path.resolve(), path.parent.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.is_relative_to(folder) or target.is_relative_to(blobs):
        return True
    raise UnsupportedModel(
        f"{path} links to {target}, outside of the model folder, and would be published with the model; copy the file there, "
        "or remove the link"
    )


def _index(shards: Shards) -> dict[str, bytes]:
    """Return the index of several shards; empty for a single one."""
    if len(shards) == 1:
        return {}
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    total = sum(t.numel() * t.element_size() for shard in shards.values() for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {"model.safetensors.index.json": json.dumps(index, indent=2).encode()}


def write_model_folder(
    folder: Path, tensors: Mapping[str, Tensor], *, like: Path, dtype: str, changed: Mapping[str, Any] | None = None
) -> None:
    """Write a model folder that `transformers` loads, atomically; an older one is replaced.

    Args:
        folder: The folder to write.
        tensors: Parameters under their Hugging Face names.
        like: The folder that training started from, with config and tokenizer.
        dtype: Name of the tensors' dtype.
        changed: Fields of ``config.json`` that differ.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = split_shards(tensors)
    for name, data in {**small_files(like, dtype, changed), **_index(shards)}.items():
        (partial / name).write_bytes(data)
    for name, shard in shards.items():
        save_file(shard, partial / name, metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
