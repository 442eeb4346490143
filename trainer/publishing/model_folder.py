"""Writes a Hugging Face model folder: shards of safetensors, their index, and the small files.

The small files are the same in a published version and in the exported model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from penstock.protocol.files import atomic_write
from penstock.protocol.weights.layout import WeightLayout, shard_header, shard_index, shard_name
from penstock.trainer.errors import UnsupportedModel

MAX_SHARD_BYTES = 1024**3
_MAX_SMALL_FILE_BYTES = 64 * 1024**2
_WEIGHTS = re.compile(r".*(\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)|\.index\.json)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class ModelFiles:
    """Some of a model folder's files of weights, written tensor by tensor; use as a context manager.

    A bucket of the layout is a file. No tensor is held: each is written to its place in the file.
    """

    def __init__(self, folder: Path, layout: WeightLayout, numbers: Iterable[int]) -> None:
        self._folder = folder
        self._layout = layout
        self._places = {t.name: (n, t) for n in numbers for t in layout.buckets[n].tensors}
        self._files: dict[int, tuple[BinaryIO, int]] = {}  # with the length of its header
        self._opened = ExitStack()

    def __enter__(self) -> ModelFiles:
        for number in sorted({number for number, _ in self._places.values()}):
            file = self._opened.enter_context((self._folder / _file_name(self._layout, number)).open("wb"))
            header = shard_header(self._layout.buckets[number])
            file.write(header)
            self._files[number] = file, len(header)
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            for file, _header_bytes in self._files.values():
                file.flush()
                os.fsync(file.fileno())

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        number, placed = self._places[name]
        file, header_bytes = self._files[number]
        dtype = getattr(torch, self._layout.buckets[number].dtype)
        whole = tensor.detach().to(dtype).to("cpu").contiguous().reshape(-1).view(torch.uint8)
        file.seek(header_bytes + placed.byte_offset)
        file.write(whole.numpy().data)


def _file_name(layout: WeightLayout, number: int) -> str:
    count = len(layout.buckets)
    return "model.safetensors" if count == 1 else shard_name(number, count)


def write_small_files(
    folder: Path, layout: WeightLayout, *, like: Path, dtype: str, changed: Mapping[str, Any] | None = None
) -> None:
    """Write everything of a model folder but its weights, their index included; ``like``, ``dtype``, ``changed`` as in `small_files`."""
    index = {"model.safetensors.index.json": shard_index(layout)} if len(layout.buckets) > 1 else {}
    for name, data in {**small_files(like, dtype, changed), **index}.items():
        atomic_write(folder / name, data, sync=True)


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
    target, folder = path.resolve(), path.parent.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.is_relative_to(folder) or target.is_relative_to(blobs):
        return True
    raise UnsupportedModel(
        f"{path} links to {target}, outside of the model folder, and would be published with the model; copy the file there, "
        "or remove the link"
    )
