"""The worker's part of a weight patch: where each changed value lies in a server's parameters, and the file of each rank.

A server with the plugin (`plugin/penstock_sglang_plugin.py`) says once where every value of the folder is in its parameters. Positions, hash and
bounds of each patch are computed here, while the server generates; inside the pause it only copies, compares, writes and reads back.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.version_reader import for_buckets
from penstock.rollout_service.engines.weight_changes import (
    LOAD_WAYS,
    NUM_THREADS,
    NoChanges,
    TensorChange,
    WeightChanges,
)

# Of the words, by device: above, a folder is loaded faster. On a CPU measured with models of 0.1 to 0.5 billion values
# (`benchmarks/in_place.md`): a reload is one memcpy there. On a GPU, where it crosses the bus, an estimate.
MAX_CHANGED_SHARE = MappingProxyType({"cpu": 0.005, "cuda": 0.05})
PLUGIN = Path(__file__).with_name("plugin")  # put on the server's import path
PLUGIN_NAME = "penstock_weight_patch"
PATCHES = "patches"  # folder beside the model folders, for files of a moment
_PROTOCOL = 1
_MAGIC = b"PWP1"
_POSITION_LIMIT = 1 << 32


class Unmapped(Exception):
    """A changed value has no known place in the server's parameters."""


@dataclass(frozen=True, slots=True)
class Block:
    """Values of a tensor in a parameter: ``dims`` are (length, stride in the tensor, stride in the parameter), outermost first in the tensor."""

    parameter: str
    tensor_offset: int
    offset: int
    dims: tuple[tuple[int, int, int], ...]

    def place(self, positions: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
        """Return which of a tensor's sorted positions are in this block, and where in the parameter they are."""
        length, stride, own_stride = self.dims[0]
        span = self.tensor_offset + 1 + sum((n - 1) * there for n, there, _ in self.dims)
        first, end = np.searchsorted(positions, [self.tensor_offset, span])
        rest = positions[first:end] - self.tensor_offset
        if len(self.dims) == 1 and stride == 1:
            return slice(first, end), self.offset + rest * own_stride
        inside = np.ones(len(rest), np.bool_)
        places = np.full(len(rest), self.offset)
        for length, stride, own_stride in self.dims:
            at, rest = np.divmod(rest, stride)
            inside &= at < length
            places += at * own_stride
        chosen = np.flatnonzero(inside & (rest == 0))
        return chosen + first, places[chosen]


@dataclass(frozen=True, slots=True)
class RankMap:
    blocks: Mapping[str, Sequence[Block]]  # by tensor of the folder
    signatures: Mapping[str, str]  # parameter → what positions in it depend on

    @classmethod
    def read(cls, path: Path) -> RankMap:
        """Return the map that one rank wrote; raises OSError or ValueError."""
        document = json.loads(path.read_text(encoding="utf-8"))
        blocks: dict[str, list[Block]] = {}
        for tensor, parameter, tensor_offset, offset, dims in document["blocks"]:
            inward = sorted((tuple(dim) for dim in dims), key=lambda dim: -dim[1])
            if any(outer[1] < inner[0] * inner[1] for outer, inner in itertools.pairwise(inward)):
                raise ValueError(f"{tensor} is not in rows and columns: {dims}")
            blocks.setdefault(tensor, []).append(Block(parameter, tensor_offset, offset, tuple(inward)))
        return cls(blocks, document["signatures"])


Words = tuple[NDArray[Any], ...]  # of a parameter, each [n]: positions, new words, old words


def write_patches(changes: WeightChanges, maps: Sequence[RankMap], prefix: Path) -> None:
    """Write ``PREFIX.RANK`` for each rank, in the format that the plugin's `read_patch` documents.

    Tensors and then parameters are done several at once. Raises Unmapped when a changed value is in no rank's map, or at a place beyond
    2^32 of a parameter.
    """
    parts: list[dict[tuple[str, str], list[Words]]] = [{} for _ in maps]
    placed: list[list[tuple[int, str, Words]]] = [[] for _ in changes.tensors]
    for_buckets(
        range(len(changes.tensors)),
        lambda number: _place(changes.tensors[number], maps, placed[number]),
        at_once=NUM_THREADS,
    )
    for change, words_of_ranks in zip(changes.tensors, placed, strict=True):
        for rank, parameter, words in words_of_ranks:
            parts[rank].setdefault((parameter, change.dtype), []).append(words)
    prefix.parent.mkdir(exist_ok=True)
    for rank, (of_rank, rank_map) in enumerate(zip(parts, maps, strict=True)):
        _write(Path(f"{prefix}.{rank}"), changes, list(of_rank.items()), rank_map.signatures)


def _place(change: TensorChange, maps: Sequence[RankMap], placed: list[tuple[int, str, Words]]) -> None:
    """Append each part of a tensor's changes with its rank and parameter."""
    has_place = np.zeros(len(change.positions), np.bool_)
    for rank, rank_map in enumerate(maps):
        for block in rank_map.blocks.get(change.name, ()):
            chosen, places = block.place(change.positions)
            has_place[chosen] = True
            if len(places):
                placed.append((rank, block.parameter, (places, change.new[chosen], change.old[chosen])))
    if not has_place.all():
        raise Unmapped(f"{np.count_nonzero(~has_place)} changed values of {change.name} have no known place")


def _joined(parameter: str, parts: Sequence[Words]) -> Words:
    """Join the words of one parameter, such as those of q, k and v, in the order of their places, and make positions u32."""
    places, new, old = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if (places[1:] <= places[:-1]).any():
        order = np.argsort(places)
        places, new, old = places[order], new[order], old[order]
    if int(places[-1]) >= _POSITION_LIMIT:
        raise Unmapped(f"{parameter} has more than {_POSITION_LIMIT} values")
    return places.astype(np.uint32), new, old


def _write(
    path: Path,
    changes: WeightChanges,
    segments: Sequence[tuple[tuple[str, str], Sequence[Words]]],
    signatures: Mapping[str, str],
) -> None:
    sizes = [
        [_aligned(sum(len(part[0]) for part in parts) * width) for width in (4, *(a.itemsize for a in parts[0][1:]))]
        for _, parts in segments
    ]
    offsets = [0, *itertools.accumulate(map(sum, sizes))]
    payload = np.empty(offsets[-1], np.uint8)
    sums = np.zeros(len(segments), np.uint64)

    def fill(number: int) -> None:
        (parameter, _), parts = segments[number]
        offset = offsets[number]
        for array, size in zip(_joined(parameter, parts), sizes[number], strict=True):
            payload[offset : offset + array.nbytes] = array.view(np.uint8)
            payload[offset + array.nbytes : offset + size] = 0
            offset += size
        sums[number] = np.add.reduce(payload[offsets[number] : offset].view(np.uint64), dtype=np.uint64)

    for_buckets(range(len(segments)), fill, at_once=NUM_THREADS)
    header = {
        "base": str(changes.base),
        "version": str(changes.version),
        "checksum": int(np.add.reduce(sums, dtype=np.uint64)),
        "segments": [
            [name, signatures[name], dtype, sum(len(part[0]) for part in parts), offset]
            for ((name, dtype), parts), offset in zip(segments, offsets, strict=False)
        ],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (_aligned(len(text)) - len(text))
    with path.open("wb") as file:
        file.write(_MAGIC + len(text).to_bytes(4, "little") + text)
        file.write(payload.data)


def _aligned(size: int) -> int:
    return size + -size % 8


@dataclass(frozen=True, slots=True)
class Offer:
    """What the plugin shows of a server."""

    tp_size: int
    device: str

    @classmethod
    def read(cls, info: Any) -> Offer | None:
        """Read ``/server_info``; None for a server without the plugin, or with one of another protocol."""
        states = info.get("internal_states") if isinstance(info, dict) else None
        shown = states[0].get(PLUGIN_NAME) if isinstance(states, list) and len(states) == 1 else None
        if not isinstance(shown, dict) or shown.get("protocol") != _PROTOCOL:
            return None
        return cls(int(shown["tp_size"]), str(shown["device"]))


class WeightPatcher:
    """The patches of one server: its maps, the patch that is staged, and how each version was loaded."""

    def __init__(self) -> None:
        self.offer: Offer | None = None
        self.num_bytes = 0  # read or written by the server inside pauses, for patches
        self._maps: list[RankMap] = []
        self._name = uuid.uuid4().hex  # several servers may have one cache folder
        self._staged: tuple[PolicyVersion, Path] | None = None
        self._way = "unsupported"  # of the next load
        self._loads: Counter[str] = Counter()

    @property
    def max_changed_share(self) -> float:
        """Largest share of the words; 0.0 while no map is accepted."""
        return MAX_CHANGED_SHARE.get(self.offer.device, 0.0) if self.offer is not None and self._maps else 0.0

    def map_prefix(self, folder: Path) -> Path:
        prefix = folder.parent / PATCHES / f"{self._name}-map"
        prefix.parent.mkdir(exist_ok=True)
        return prefix

    def read_maps(self, folder: Path) -> None:
        """Accept the map of each rank. Blocking; raises OSError or ValueError."""
        assert self.offer is not None
        paths = [Path(f"{self.map_prefix(folder)}.{rank}.json") for rank in range(self.offer.tp_size)]
        self._maps = [RankMap.read(path) for path in paths]
        for path in paths:
            path.unlink()

    def stage(self, changes: WeightChanges | NoChanges, folder: Path) -> bool:
        """Write the files of a patch, or note why there is none and return False. Blocking; raises OSError."""
        self.forget_staged()
        if not self._maps:
            return False
        if not isinstance(changes, WeightChanges):
            self._way = changes
        elif changes.num_changed > self.max_changed_share * changes.num_words:
            self._way = "dense"
        else:
            prefix = folder.parent / PATCHES / f"{self._name}-{changes.version}"
            self._staged = (changes.version, prefix)
            try:
                write_patches(changes, self._maps, prefix)
            except Unmapped:
                self.forget_staged()
                self._way = "unmapped"
        return self._staged is not None

    def take(self, version: PolicyVersion) -> Path | None:
        """Return the prefix of the staged files of a version, or None."""
        return self._staged[1] if self._staged is not None and self._staged[0] == version else None

    def forget_staged(self) -> None:
        if self._staged is not None:
            for rank in range(len(self._maps)):
                Path(f"{self._staged[1]}.{rank}").unlink(missing_ok=True)
            self._staged = None

    def refused(self) -> None:
        self.forget_staged()
        self._way = "refused"

    def loaded(self, num_bytes: int | None = None) -> None:
        """Count one load by its way, a patch by what the server has read or written; forget what was staged for it."""
        self.forget_staged()
        self.num_bytes += num_bytes or 0
        self._loads[self._way if num_bytes is None else "patch"] += 1
        self._way = "chain" if self._maps else "unsupported"

    def figures(self) -> dict[str, float]:
        return {"engine_patch_bytes": float(self.num_bytes)} | {
            f"engine_loads_{way}": self._loads[way] for way in LOAD_WAYS
        }
