"""Where the tokens of images stand in a row, and their positions for rotary embeddings; pure.

A chat template puts one placeholder token where an image is. A row of Penstock holds an image's tokens all: its ids are those that
the model computes, in task, pack, engine and trainer. Only an engine that expands placeholders itself is sent the `collapsed` ids.

A sampled token may have the id of an image's; it is an ordinary token. So images are found by position, never by id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ImageRefused
from penstock.protocol.facts import MAX_IMAGES, ImageRef, RowImages
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.images.processor import ImageProcessor


def expanded(
    token_ids: Sequence[int], images: Sequence[AdmittedImage], processor: ImageProcessor, *, at: int = 0
) -> tuple[list[int], RowImages | None]:
    """Return token ids with each placeholder replaced by its image's tokens, and where they are.

    Args:
        token_ids: With one placeholder for each image, in order: a rendered prompt, or what follows ``at`` tokens of a row.
        images: As admitted.
        processor: Of the model.
        at: Tokens of the row before these; positions count from the row's beginning.

    Raises:
        ImageRefused: For more images than a row may have, and for another number of placeholders than images, such as where a text
            holds the placeholder's.
    """
    num_placeholders = sum(token == processor.image_token_id for token in token_ids)
    if num_placeholders != len(images):
        raise ImageRefused(
            f"{num_placeholders} placeholders of images (token {processor.image_token_id}) for {len(images)} images: the chat template "
            "writes one for each image, and no text may contain it"
        )
    if len(images) > MAX_IMAGES:
        raise ImageRefused(f"{len(images)} images, a row may have {MAX_IMAGES}")
    ids: list[int] = []
    refs = []
    remaining = iter(images)
    for token in token_ids:
        if token != processor.image_token_id:
            ids.append(token)
            continue
        image = next(remaining)
        grid = processor.grid_of(image.width, image.height)
        count = processor.num_tokens(grid)
        refs.append(
            ImageRef(
                position=at + len(ids), num_tokens=count, grid_thw=grid, sha256=image.sha256, size_bytes=len(image.data)
            )
        )
        ids += [token] * count
    return ids, RowImages(processor=processor.sha256, refs=tuple(refs)) if refs else None


def collapsed(token_ids: Sequence[int], images: RowImages | None) -> list[int]:
    """Return token ids with one placeholder for each image, as SGLang expects them beside ``image_data``."""
    ids: list[int] = []
    before = 0
    for ref in images.refs if images is not None else ():
        ids += token_ids[before : ref.position + 1]
        before = ref.end
    return [*ids, *token_ids[before:]]


def joined(one: RowImages | None, other: RowImages | None) -> RowImages | None:
    """Return the images of a row that continues with further ones; raises ImageRefused for too many, or another processor."""
    if one is None or other is None:
        return one or other
    if one.processor != other.processor:
        raise ImageRefused(f"images of the processors {one.processor} and {other.processor} in one row")
    if len(one.refs) + len(other.refs) > MAX_IMAGES:
        raise ImageRefused(f"{len(one.refs) + len(other.refs)} images, a row may have {MAX_IMAGES}")
    return RowImages(processor=one.processor, refs=(*one.refs, *other.refs))


def rope_positions(num_tokens: int, images: RowImages | None, merge_size: int) -> npt.NDArray[np.int64]:
    """Return the positions of a row's tokens for rotary embeddings, [3, num_tokens]: temporal, of the height, of the width.

    As `get_rope_index` of Qwen2.5-VL in transformers 5: a token of text is one further than the one before it, in all three. The
    tokens of an image count rows and columns from where the text ended, and the text continues behind the larger of the two.
    ``num_tokens`` may end inside an image; the position of a token never depends on what follows it.
    """
    found = np.empty((3, num_tokens), dtype=np.int64)
    token = position = 0
    for ref in images.refs if images is not None else ():
        found[:, token : ref.position] = np.arange(position, position + max(0, min(ref.position, num_tokens) - token))
        if ref.position >= num_tokens:
            return found
        position += ref.position - token
        rows, columns = ref.grid_thw[1] // merge_size, ref.grid_thw[2] // merge_size
        grid = np.indices((1, rows, columns)).reshape(3, -1) + position
        token = min(ref.end, num_tokens)
        found[:, ref.position : token] = grid[:, : token - ref.position]
        position += max(rows, columns)
    found[:, token:] = np.arange(position, position + num_tokens - token)
    return found


def next_position(num_tokens: int, images: RowImages | None, merge_size: int) -> int:
    """Return the position, in all three directions, of the token behind the first ``num_tokens``; none of these may cut an image."""
    skipped = 0
    for ref in images.refs if images is not None else ():
        if ref.end <= num_tokens:
            skipped += ref.num_tokens - max(ref.grid_thw[1], ref.grid_thw[2]) // merge_size
    return num_tokens - skipped
