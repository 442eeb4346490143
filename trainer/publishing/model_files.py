"""The files of a Hugging Face model folder: shards of safetensors, their index, and small files.

They are the same in a published version and in the exported model.
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

from penstock.protocol.files import atomic_write, target_outside
from penstock.protocol.weights.layout import WeightLayout, shard_header, shard_index, shard_name
from penstock.protocol.weights.manifest import SMALL_FILE
from penstock.trainer.errors import UnsupportedModel

MAX_SHARD_BYTES = 1024**3
_MAX_SMALL_FILE_BYTES = 64 * 1024**2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class ModelFiles:
    """Some of a folder's files of weights, a bucket each, written tensor by tensor; a context manager."""

    def __init__(self, folder: Path, layout: WeightLayout, numbers: Iterable[int]) -> None:
        self._folder, self._layout = folder, layout
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
    index = {"model.safetensors.index.json": shard_index(layout)} if len(layout.buckets) > 1 else {}
    for name, data in {**small_files(like, dtype, changed), **index}.items():
        atomic_write(folder / name, data, sync=True)


def small_files(model_folder: Path, dtype: str, changed: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files of a model folder besides its weights that a manifest may name: config, tokenizer, templates.

    ``config.json`` gets the ``dtype`` of the new weights, and what else has ``changed``. Raises UnsupportedModel for a link out of the folder: what it
    links to would be published.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(model_folder.iterdir())
        if path.is_file()
        and _NAME.fullmatch(path.name)
        and SMALL_FILE.fullmatch(path.name)
        and path.stat().st_size <= _MAX_SMALL_FILE_BYTES
        and _is_own(path)
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype, **(changed or {})}
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def _is_own(path: Path) -> bool:
    if (target := target_outside(path, path.parent)) is None:
        return True
    raise UnsupportedModel(
        f"{path} links to {target}, outside of the model folder, and would be published with the model; copy the file there, "
        "or remove the link"
    )
