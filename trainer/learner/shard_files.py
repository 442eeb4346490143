"""The shards of a checkpoint: one file a rank, read again by any number of ranks at any ZeRO stage.

A shard holds *fragments*: a contiguous run of elements of a flattened parameter, with the float32 master weights and the
optimizer's moments of these elements, each a one-dimensional tensor ``NAME#KIND``. The file is a safetensors file, so that
nothing is unpickled when it is read; its metadata gives where each fragment starts. Together the shards hold every element of
every parameter once. A fragment that a rank needs is cut out of those of all files, so the ranks and stages that wrote
them do not matter.

Ranks that share the weights (tensor parallelism) each have a part of some parameters, cut along a dimension. Their fragments are runs of
their part; another layout puts the parts together when it reads them.

A copy of the trainer's state in memory is written while all ranks train on: rank 0's thread orders it, and each rank writes its part of
the copy that `Learner.capture` made. No rank holds more than one such copy.
"""

from __future__ import annotations

import json
import math
import os
import queue
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.trainer import crash_points, process_memory
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError
from penstock.trainer.rank_orders import RankOrders, order
from penstock.trainer.ranks import Ranks

WEIGHT = "weight"  # the kind of a fragment that holds float32 master weights; other kinds are the optimizer's
_FORMAT = "penstock_shard.v1"
_FORMAT_OF_PARTS = "penstock_shard.v2"  # parameters that are cut, which earlier releases would read as whole ones
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_PATTERN = "rank*.safetensors"

_CAPTURE_S = 600.0  # a rank may still be copying when it is asked to write


@dataclass(frozen=True, slots=True)
class Cut:
    dim: int
    count: int

    def part_of(self, whole: Tensor, index: int) -> Tensor:
        return whole.chunk(self.count, self.dim)[index]


@dataclass(frozen=True, slots=True)
class Part:
    cut: Cut
    index: int


@dataclass(frozen=True, slots=True)
class Fragment:
    name: str
    start: int
    tensors: Mapping[str, Tensor]  # by kind, [L] float32 each


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    num_ranks: int
    shapes: Mapping[str, Sequence[int]]  # of every parameter, whole, also of those that other ranks write
    fragments: Sequence[Fragment]
    state: Mapping[str, Any]  # JSON types; the same on every rank
    parts: Mapping[str, Part] = field(default_factory=dict)  # of the parameters that are cut

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for fragment in self.fragments for t in fragment.tensors.values())

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{part.name}#{kind}": t for part in self.fragments for kind, t in part.tensors.items()}
        document = {
            "format": _FORMAT if not self.parts else _FORMAT_OF_PARTS,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "starts": {fragment.name: fragment.start for fragment in self.fragments},
            "state": dict(self.state),
        }
        if self.parts:
            document["parts"] = {name: [part.cut.dim, part.cut.count, part.index] for name, part in self.parts.items()}
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
    key: str  # in the file


@dataclass(slots=True)
class ShardFiles:
    folder: Path
    state: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    num_ranks: int = 0
    _cuts: dict[str, Cut] = field(default_factory=dict)
    _pieces: dict[str, list[_Piece]] = field(default_factory=dict)  # by parameter and kind, and by part where it is cut
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
        self._opened.close()

    def kinds(self, name: str) -> list[str]:
        first = name if name not in self._cuts else _of_part(name, 0)
        keys = self._pieces.keys()
        return [key.rpartition("#")[2] for key in keys if key.rpartition("#")[0] == first]

    def read(self, name: str, kind: str, start: int, num: int, part: Part | None = None) -> Tensor:
        """Return elements ``start`` to ``start + num`` of a flattened parameter, or of a part of it, [num] float32."""
        stored = self._cuts.get(name)
        if stored == (part.cut if part else None):
            return self._read(f"{_of_part(name, part.index) if part else name}#{kind}", start, num)
        whole = self._whole(name, kind, stored)
        wanted = part.cut.part_of(whole, part.index) if part else whole
        return wanted.flatten()[start : start + num]

    def _whole(self, name: str, kind: str, cut: Cut | None) -> Tensor:
        shape = self.shapes[name]
        if cut is None:
            return self._read(f"{name}#{kind}", 0, math.prod(shape)).view(shape)
        part_shape = list(shape)
        part_shape[cut.dim] //= cut.count
        pieces = [
            self._read(f"{_of_part(name, number)}#{kind}", 0, math.prod(part_shape)).view(part_shape)
            for number in range(cut.count)
        ]
        return torch.cat(pieces, dim=cut.dim)

    def _read(self, key: str, start: int, num: int) -> Tensor:
        parts = [
            piece.file.get_slice(piece.key)[max(start, piece.start) - piece.start : start + num - piece.start]
            for piece in self._pieces[key]
            if piece.start < start + num and start < piece.start + piece.num
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _open(self) -> None:
        paths = sorted(self.folder.glob(_PATTERN))
        for path in paths:
            file = self._opened.enter_context(safe_open(path, framework="pt"))
            document = json.loads(file.metadata()["shard"])
            if document["format"] not in (_FORMAT, _FORMAT_OF_PARTS):
                raise ValueError(f"{path.name}: expected format {_FORMAT_OF_PARTS}, got {document['format']}")
            self.state, self.shapes, self.num_ranks = document["state"], document["shapes"], document["num_ranks"]
            parts = {
                name: Part(Cut(dim, count), index) for name, (dim, count, index) in document.get("parts", {}).items()
            }
            cuts = {name: part.cut for name, part in parts.items()}
            if path != paths[0] and cuts != self._cuts:
                raise ValueError(f"{path.name}: its parameters are not cut as those of {paths[0].name}")
            self._cuts = cuts
            for key in file.keys():  # noqa: SIM118  not a mapping
                name, _, kind = key.rpartition("#")
                start = document["starts"][name]
                (num,) = file.get_slice(key).get_shape()
                owner = _of_part(name, parts[name].index) if name in parts else name
                self._pieces.setdefault(f"{owner}#{kind}", []).append(_Piece(start, num, file, key))
        if len(paths) != self.num_ranks:
            raise ValueError(f"expected {self.num_ranks} shard(s), found {len(paths)}")
        for name, shape in self.shapes.items():
            cut = self._cuts.get(name)
            owners = [name] if cut is None else [_of_part(name, number) for number in range(cut.count)]
            for owner in owners:
                for kind in {WEIGHT, *self.kinds(name)}:
                    self._check_whole(f"{owner}#{kind}", math.prod(shape) // len(owners))

    def _check_whole(self, key: str, num: int) -> None:
        position = 0
        for piece in sorted(self._pieces.get(key, []), key=lambda piece: piece.start):
            if piece.start != position:
                break
            position += piece.num
        if position != num or sum(piece.num for piece in self._pieces.get(key, [])) != num:
            raise ValueError(f"{key}: the shards do not hold each of its {num} elements once")


def _of_part(name: str, index: int) -> str:
    return f"{name}@{index}"


def has_shards(folder: Path) -> bool:
    return any(folder.glob(_PATTERN))


@dataclass(frozen=True, slots=True)
class CapturedPart:
    tag: str  # its folder in the checkpoint
    shard: Shard
    random_states: Mapping[str, bytes] = field(
        default_factory=dict
    )  # of this rank, by file; none: another part has them

    def write(self, folder: Path) -> None:
        self.shard.write(folder / self.tag)
        for name, state in self.random_states.items():
            (folder / name).write_bytes(state)


@dataclass(frozen=True, slots=True)
class CapturedState:
    parts: Sequence[CapturedPart]

    def write(self, folder: Path) -> None:
        for part in self.parts:
            part.write(folder)
            crash_points.reach(CrashPoint.SHARD_WRITTEN)


class CaptureSlot:
    def __init__(self) -> None:
        self._slot: queue.Queue[CapturedState] = queue.Queue(maxsize=1)

    def put(self, captured: CapturedState) -> None:
        """Hold a copy; raises CheckpointError if the one before was not written."""
        try:
            self._slot.put_nowait(captured)
        except queue.Full:
            raise CheckpointError("internal error, please report: a copy of the state was never written") from None

    @order
    def write(self, folder: Path) -> None:
        """Write the copy below a checkpoint's folder, and release it; raises OSError, or CheckpointError without a copy."""
        try:
            captured = self._slot.get(timeout=_CAPTURE_S)
        except queue.Empty:
            raise CheckpointError(f"no state was copied for {folder.name} within {_CAPTURE_S:.0f} s") from None
        captured.write(folder)
        del captured
        process_memory.return_freed_memory()


class CheckpointWriter:
    def __init__(self, slot: CaptureSlot, ranks: Ranks | None) -> None:
        """``slot`` is this rank's copy. Made on all ``ranks``, of which those but 0 only answer; None: one process is alone."""
        self._orders = RankOrders(slot, ranks, "checkpoint", OSError)

    def write(self, folder: Path) -> None:
        """Write them below a shared folder (rank 0); raises OSError naming ranks, or RankUnresponsive."""
        self._orders.ask(CaptureSlot.write, folder)


def random_state_name(rank: int) -> str:
    return f"random_state_{rank}.bin"
