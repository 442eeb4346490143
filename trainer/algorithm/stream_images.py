"""Images in a stream of rows: which tokens are which part of which image, and the positions of all tokens; pure.

The tokens of all images have the same id, so a prefix with another picture would look the same. For packing, every token of an image
is therefore given a number of its own below 0, which says which part of which image of the micro-batch it is. So rows share an
image of a common prefix, an image is computed once however often it occurs, and a token is found by its place, never by its id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.protocol.facts import ImageRef, RowImages
from penstock.protocol.images.processor import rope_positions
from penstock.trainer.algorithm.packed_rows import PackedRows, Tokens


class PlacedImages(NamedTuple):
    run_id: str
    images: RowImages


class StoredImage(NamedTuple):
    run_id: str
    ref: ImageRef


@dataclass(frozen=True, slots=True, eq=False)
class ImageParts:
    """The distinct images of some rows; their parts are numbered through all of them."""

    images: tuple[StoredImage, ...]
    rows: list[Tokens]  # of each row, its tokens with ``-1 - part`` for each token of an image


@dataclass(frozen=True, slots=True, eq=False)
class StreamImages:
    """The images of a micro-batch: P patches of all, M tokens of the stream that show one of their parts."""

    images: tuple[StoredImage, ...]  # each once
    grid_thw: Tensor  # [images, 3] int64
    places: Tensor  # [M] int64, in the stream
    parts: Tensor  # [M] int64, which of all parts of all images, in their order
    read: Callable[[StoredImage], npt.NDArray[np.float32]] | None = None  # the patches of one

    def pixel_values(self) -> Tensor:
        """Return the patches of all images, [P, values of a patch] float32."""
        if self.read is None:
            raise ValueError("internal error, please report: images of a micro-batch without their pixel values")
        return torch.from_numpy(np.concatenate([self.read(image) for image in self.images]))

    def to(self, device: torch.device) -> StreamImages:
        """Move the indices to a device; patches are computed when they are asked for."""
        return replace(
            self, grid_thw=self.grid_thw.to(device), places=self.places.to(device), parts=self.parts.to(device)
        )


def number_parts(rows: Sequence[Tokens], images: Sequence[PlacedImages | None]) -> ImageParts:
    """Number the parts of all images of rows; an image that occurs in several places has the same numbers everywhere."""
    first: dict[tuple[str, tuple[int, int, int], int], int] = {}
    found: list[StoredImage] = []
    size = 0
    numbered = []
    for tokens, placed in zip(rows, images, strict=True):
        if placed is None:
            numbered.append(tokens)
            continue
        copied = tokens.copy()
        for ref in placed.images.refs:
            key = ref.sha256, ref.grid_thw, ref.num_tokens
            if key not in first:
                first[key] = size
                found.append(StoredImage(placed.run_id, ref))
                size += ref.num_tokens
            copied[ref.position : ref.end] = -1 - first[key] - np.arange(ref.num_tokens)
        numbered.append(copied)
    return ImageParts(tuple(found), numbered)


def restored(packed: PackedRows, rows: Sequence[Tokens]) -> PackedRows:
    token_ids = packed.token_ids.copy()
    for tokens, where in zip(rows, packed.positions, strict=True):
        token_ids[where] = tokens[: len(where)]
    return replace(packed, token_ids=token_ids)


def in_stream(parts: ImageParts, packed: PackedRows) -> StreamImages | None:
    if not parts.images:
        return None
    places = np.flatnonzero(packed.token_ids < 0)
    return StreamImages(
        parts.images,
        torch.tensor([image.ref.grid_thw for image in parts.images], dtype=torch.int64),
        torch.from_numpy(places),
        torch.from_numpy(-1 - packed.token_ids[places]),
    )


def stream_positions(packed: PackedRows, images: Sequence[PlacedImages | None]) -> npt.NDArray[np.int64]:
    """Return the positions of a stream's tokens for rotary embeddings, [3, T]: for every row those that it has alone."""
    found = np.zeros((3, len(packed.token_ids)), dtype=np.int64)
    for where, placed in zip(packed.positions, images, strict=True):
        row = None if placed is None else placed.images
        found[:, where] = rope_positions(len(where), row, 1 if row is None else merge_size(row.refs[0]))
    return found


def merge_size(ref: ImageRef) -> int:
    """Return how many patches of an image a token stands for in each direction."""
    return math.isqrt(ref.num_patches // ref.num_tokens)
