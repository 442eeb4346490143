"""Columns of a pack whose rows have images, beside those of every pack; pure.

A row has six numbers for each image, in the order of its tokens: position and number of its tokens, the three sides of its grid of
patches, and the bytes of the object that `image_sha256` names. The images of tokens that a row of an episode shares with an earlier one
are stored with both. The rows without an image, in the same pack, have empty lists, and no processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from penstock.protocol.errors import PackError
from penstock.protocol.facts import ImageRef, RowImages
from penstock.protocol.packs.pack_rows import Rows, list_of, lists
from penstock.protocol.trajectory import Group

FIELDS = (
    pa.field("image_processor", pa.string(), nullable=False),  # "": the row has no image
    pa.field("image_numbers", list_of(pa.int64()), nullable=False),
    pa.field("image_sha256", list_of(pa.string()), nullable=False),
)
_NUMBERS = 6


def columns(groups: Sequence[Group]) -> list[pa.Array]:
    row_images = [row.images for group in groups for row in group.trajectories]
    refs = [images.refs if images is not None else () for images in row_images]
    numbers = [[(r.position, r.num_tokens, *r.grid_thw, r.size_bytes) for r in some] for some in refs]
    return [
        pa.array([images.processor if images is not None else "" for images in row_images], pa.string()),
        lists([np.array(some, dtype=np.int64).reshape(-1) for some in numbers], pa.int64()),
        lists([np.array([ref.sha256 for ref in some], dtype=object) for some in refs], pa.string()),
    ]


def of_rows(rows: Rows) -> list[RowImages | None]:
    if "image_processor" not in rows.table.column_names:
        return [None] * rows.starts[-1]
    values, at = rows.lists("image_numbers")
    hashes, hashes_at = rows.lists("image_sha256")
    numbers = values.tolist()
    found: list[RowImages | None] = []
    for row, processor in enumerate(rows.values("image_processor")):
        own = numbers[at[row] : at[row + 1]]
        names = hashes[hashes_at[row] : hashes_at[row + 1]].tolist()
        if len(own) != _NUMBERS * len(names) or bool(own) != bool(processor):
            raise PackError(
                f"a row has {len(own)} numbers and {len(names)} names of images, and the processor {processor[:80]!r}; "
                f"expected {_NUMBERS} numbers and a name for each image, and a processor if there is one"
            )
        found.append(_images(processor, own, names) if own else None)
    return found


def _images(processor: str, numbers: Sequence[int], names: Sequence[Any]) -> RowImages:
    values = iter(numbers)
    sixes = zip(values, values, values, values, values, values, names, strict=True)
    try:
        return RowImages(
            processor=processor,
            refs=tuple(
                [
                    ImageRef(position=at, num_tokens=count, grid_thw=(t, h, w), sha256=name, size_bytes=size)
                    for at, count, t, h, w, size, name in sixes
                ]
            ),
        )
    except ValidationError as err:
        raise PackError(f"a row's images: {err.errors()[0]['msg']}") from None
