"""Find the words of the weights that changed since the version before, where the weights are, and bring only these to the host.

A word is one value, compared by its bits. On a device its words are compared by torch, on a CPU by `patch_segment.changed_words`, which
needs half of the time (`benchmarks/weights/flow.md`). What is compared with are the words that were read last: those that are kept
in host memory, or a copy of them on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.protocol.weights import patch_segment
from penstock.protocol.weights.patch_segment import Difference
from penstock.trainer.errors import PublicationFailed

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words compared at once: on a device each takes a byte for the result and, from host memory, its own size, and each time is one wait.
_COMPARED = 1 << 25
_POSITION_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class ChangedPiece:
    """Words of one tensor that changed, beginning at word ``start``: at int32 ``positions`` [n], or all of them where it is None."""

    tensor: int  # its number in the layout
    start: int
    positions: Tensor | None
    words: Tensor  # [n]
    before: Tensor | None = None  # the words [n] that they replace, where they were at hand

    def positions_from(self, first: int) -> Tensor:
        """Return the positions, int64 [n] on the host, where word ``start`` is number ``first``."""
        if self.positions is None:
            return torch.arange(first, first + self.words.numel())
        return self.positions.long().add_(first)

    def on_host(self) -> ChangedPiece:
        """Return it in host memory; from a device it is there when the stream was waited for."""
        if self.words.device.type == "cpu":
            return self
        positions = None if self.positions is None else _on_host(self.positions)
        return ChangedPiece(self.tensor, self.start, positions, _on_host(self.words))


def as_words(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values, rounded to ``dtype``, as one-dimensional words: a view where nothing has to be converted."""
    rounded = values.detach().to(dtype).reshape(-1)
    return rounded.view(_WORDS[rounded.element_size()])


def find(tensor: int, start: int, before: Tensor, now: Tensor) -> Iterator[ChangedPiece]:
    """Yield what differs between the words of a tensor from ``start`` on, both [n]; ``before`` may be in host memory."""
    for first in range(0, now.numel(), _COMPARED):
        new = now[first : first + _COMPARED]
        old = before[first : first + _COMPARED].to(new.device, non_blocking=True)
        piece = _changed(tensor, start + first, old, new)
        if piece.words.numel() * (_POSITION_BYTES + new.element_size()) > new.nbytes:
            yield ChangedPiece(tensor, start + first, None, new.clone())
        elif piece.words.numel():
            yield piece


def _changed(tensor: int, start: int, before: Tensor, now: Tensor) -> ChangedPiece:
    if now.device.type == "cpu":
        positions, deltas, words = patch_segment.changed_words(before.numpy(), now.numpy())
        replaced = torch.from_numpy(words ^ deltas)
        return ChangedPiece(
            tensor, start, torch.from_numpy(positions.astype(np.int32)), torch.from_numpy(words), replaced
        )
    where = (before != now).nonzero().squeeze(1)
    return ChangedPiece(tensor, start, where.to(torch.int32), now.index_select(0, where))


class ReadWords:
    """The words of this rank's tensors, or of its parts of them, as they were read last. Used by one thread."""

    def __init__(self, kept_on_device: bool) -> None:
        self._kept_on_device = kept_on_device
        self._kept: dict[tuple[int, int], Tensor] = {}  # by tensor and first word; others are read in their buckets
        self._late: list[
            tuple[Tensor, int, ChangedPiece]
        ] = []  # what was found, on its way to the host, of words that are kept there

    def keep(self, tensor: int, start: int, words: Tensor) -> None:
        on_host = words if self._kept_on_device else _on_host(words)
        self._kept[tensor, start] = on_host.clone() if on_host is words else on_host

    def changed(self, tensor: int, start: int, words: Tensor, place: Callable[[int], Tensor]) -> list[ChangedPiece]:
        """Return what changed since the words were read last, on its way to host memory; ``place`` has those that are not kept."""
        kept = self._kept.get((tensor, start))
        if kept is None and self._kept_on_device and words.device.type != "cpu":
            kept = self._kept[tensor, start] = place(tensor).to(words.device)
        pieces = []
        for piece in find(tensor, start, place(tensor) if kept is None else kept, words):
            pieces.append(piece.on_host())
            if kept is not None and kept.device == words.device:
                _overwrite(kept, start, piece)
            elif kept is not None:
                self._late.append((kept, start, pieces[-1]))
        return pieces

    def settle(self) -> None:
        """Keep what was found; called when the stream was waited for."""
        for kept, start, piece in self._late:
            _overwrite(kept, start, piece)
        self._late = []


def _overwrite(words: Tensor, first: int, piece: ChangedPiece) -> None:
    if piece.positions is None:
        words[piece.start - first :][: piece.words.numel()] = piece.words
    else:
        words.index_copy_(0, piece.positions.long() + (piece.start - first), piece.words)


def _on_host(values: Tensor) -> Tensor:
    """Return values in pinned memory, whose copy may still be on its way: the stream has to be waited for."""
    if values.device.type == "cpu":
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(values, non_blocking=True)


class ReadStream:
    """A CUDA stream of its own, on which a thread reads weights while training goes on; on another device nothing but the thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Have what is read next wait for the work that the calling thread submitted so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextlib.contextmanager
    def reading(self, *, apart: bool) -> Iterator[None]:
        """Submit the block's work to the stream, or unless it is ``apart`` to the caller's; and wait for it at the end."""
        with torch.no_grad(), torch.cuda.stream(self._stream if apart else None):
            yield
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).synchronize()


def pack(pieces: Iterable[ChangedPiece]) -> bytes:
    """Return what another rank needs of what was found, as MessagePack."""
    rows = [(piece.tensor, piece.start, piece.positions, piece.words) for piece in pieces]
    data = msgpack.packb(
        [[n, start, p if p is None else p.numpy().data, w.itemsize, w.numpy().data] for n, start, p, w in rows]
    )
    assert data is not None
    return data


def pack_failure(error: Exception) -> bytes:
    """Return what the other ranks get instead from a rank that could not read its words."""
    data = msgpack.packb(f"{type(error).__name__}: {error}")
    assert data is not None
    return data


def unpack(data: bytes, rank: int = 0) -> list[ChangedPiece]:
    """Return what ``rank`` packed; raises PublicationFailed if it could not read its words."""
    rows = msgpack.unpackb(data)
    if isinstance(rows, str):
        raise PublicationFailed(
            f"rank {rank} could not read its part of the weights: {rows}; see its log, then start the trainer again"
        )
    return [
        ChangedPiece(tensor, start, positions and _tensor(positions, torch.int32), _tensor(words, _WORDS[size]))
        for tensor, start, positions, size, words in rows
    ]


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedWords:
    """Words of one bucket that a version changed: int64 ``positions`` [n], increasing; the words [n] that it replaced, and its own."""

    positions: NDArray[np.int64]
    before: np.ndarray
    after: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.before.nbytes + self.after.nbytes

    def difference(self) -> Difference:
        return patch_segment.changed_planes(self.positions, self.before ^ self.after, self.after)

    def followed_by(self, later: ChangedWords) -> ChangedWords:
        """Return what both change together; a word that the later one changes back is not among it."""
        positions = patch_segment.union(self.positions, later.positions)
        before, after = (np.empty(positions.size, self.before.dtype) for _ in range(2))
        own, others = (np.searchsorted(positions, changed.positions) for changed in (self, later))
        before[others], after[own] = later.before, self.after
        before[own], after[others] = self.before, later.after
        return ChangedWords(positions, before, after).without_unchanged()

    def without_unchanged(self) -> ChangedWords:
        """Return those that differ from what they replaced; a segment that counts others is refused."""
        differs = self.before != self.after
        return (
            self if differs.all() else ChangedWords(self.positions[differs], self.before[differs], self.after[differs])
        )
