"""The shards of a checkpoint: one file a rank, read again by any number of ranks at any ZeRO stage.

A shard holds *fragments*: a contiguous run of elements of a flattened parameter, with the float32 master weights and the
optimizer's moments of these elements, each a one-dimensional tensor ``NAME#KIND``. The file is a safetensors file, so that
nothing is unpickled when it is read; its metadata gives where each fragment starts. Together the shards hold every element of
every parameter once. A fragment that a rank needs is cut out of those of all files, so the ranks and stages that wrote
them do not matter.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.trainer.errors import CheckpointError

WEIGHT = "weight"  # the kind of a fragment that holds float32 master weights; other kinds are the optimizer's
_FORMAT = "penstock_shard.v1"
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_PATTERN = "rank*.safetensors"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``start`` and following of a flattened parameter."""

    name: str
    start: int
    tensors: Mapping[str, Tensor]  # by kind, [L] float32 each


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank writes of a network and its optimizer."""

    rank: int
    num_ranks: int
    shapes: Mapping[str, Sequence[int]]  # of every parameter, also of those that other ranks write
    fragments: Sequence[Fragment]
    state: Mapping[str, Any]  # JSON types; the same on every rank

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for fragment in self.fragments for t in fragment.tensors.values())

    def write(self, folder: Path) -> None:
        """Write the shard's file into ``folder`` and to disk, tensor by tensor; raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{one.name}#{kind}": t for one in self.fragments for kind, t in one.tensors.items()}
        document = {
            "format": _FORMAT,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "starts": {one.name: one.start for one in self.fragments},
            "state": dict(self.state),
        }
        header: dict[str, Any] = {"__metadata__": {"shard": json.dumps(document)}}
        end = 0
        for key, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [start, end]}
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / f"rank{self.rank:05d}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for tensor in tensors.values():
                file.write(tensor.numpy().data)
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    num: int
    file: Any  # of safetensors, open


@dataclass(slots=True)
class ShardFiles:
    """All shards of one network in a checkpoint; use as a context manager."""

    folder: Path
    state: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    num_ranks: int = 0
    _pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    _opened: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> ShardFiles:
        """Open every file; raises CheckpointError unless they hold every element of every parameter once."""
        try:
            self._open()
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as err:
            self._opened.close()
            raise CheckpointError(
                f"checkpoint {self.folder} is not readable ({type(err).__name__}: {err}); restore it from a copy, or "
                "remove its folder and set trainer.resume_older_step to the step of the one before it"
            ) from err
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._opened.close()

    def kinds(self, name: str) -> list[str]:
        """Return the kinds that are stored of a parameter."""
        keys = self._pieces.keys()
        return [key.rpartition("#")[2] for key in keys if key.rpartition("#")[0] == name]

    def read(self, name: str, kind: str, start: int, num: int) -> Tensor:
        """Return elements ``start`` to ``start + num`` of a flattened parameter, [num] float32."""
        key = f"{name}#{kind}"
        parts = [
            piece.file.get_slice(key)[max(start, piece.start) - piece.start : start + num - piece.start]
            for piece in self._pieces[key]
            if piece.start < start + num and start < piece.start + piece.num
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _open(self) -> None:
        paths = sorted(self.folder.glob(_PATTERN))
        for path in paths:
            file = self._opened.enter_context(safe_open(path, framework="pt"))
            document = json.loads(file.metadata()["shard"])
            if document["format"] != _FORMAT:
                raise ValueError(f"{path.name}: expected format {_FORMAT}, got {document['format']}")
            self.state, self.shapes, self.num_ranks = document["state"], document["shapes"], document["num_ranks"]
            for key in file.keys():  # noqa: SIM118  not a mapping
                start = document["starts"][key.rpartition("#")[0]]
                (num,) = file.get_slice(key).get_shape()
                self._pieces.setdefault(key, []).append(_Piece(start, num, file))
        if len(paths) != self.num_ranks:
            raise ValueError(f"expected {self.num_ranks} shard(s), found {len(paths)}")
        for name, shape in self.shapes.items():
            for kind in {WEIGHT, *self.kinds(name)}:
                self._check_whole(f"{name}#{kind}", math.prod(shape))

    def _check_whole(self, key: str, num: int) -> None:
        position = 0
        for piece in sorted(self._pieces.get(key, []), key=lambda piece: piece.start):
            if piece.start != position:
                break
            position += piece.num
        if position != num or sum(piece.num for piece in self._pieces.get(key, [])) != num:
            raise ValueError(f"{key}: the shards do not hold each of its {num} elements once")


def has_shards(folder: Path) -> bool:
    """Return True if a checkpoint was written as shards, not by DeepSpeed as in releases before."""
    return any(folder.glob(_PATTERN))
