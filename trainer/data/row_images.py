"""The images of a row: in the parts of its messages, or in a column with placeholders in the messages; pure.

| written by     | column `images`        | in the messages                                            |
|----------------|------------------------|------------------------------------------------------------|
| transformers   | -                      | parts `{"type": "image", "image": …}` (or path, base64)    |
| OpenAI         | -                      | parts `{"type": "image_url", "image_url": {"url": …}}`     |
| TRL            | list of images         | parts `{"type": "image"}`                                  |
| verl           | list of images         | `<image>` in the texts                                     |

An image is bytes, base64, a path below the folder of the data file, or the object with bytes and path that Hugging Face
datasets store.

`ImageRows` reads their bytes, decoded once within limits, and the tokens that stand for them in the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.protocol.errors import ImageRefused
from penstock.protocol.facts import RowImages
from penstock.protocol.images.admission import IMAGE_TYPES, AdmittedImage, Source, admit, image_bytes, take_images
from penstock.protocol.images.processor import ImageProcessor, expanded
from penstock.trainer.data.messages import Chat, refuse
from penstock.trainer.data.row_files import Row
from penstock.trainer.errors import MalformedData

if TYPE_CHECKING:
    from penstock.trainer.data.read_rows import PromptRow

COLUMN = "images"
PLACEHOLDER = "<image>"


def images_of(row: Row) -> list[Source]:
    value = row.get(COLUMN)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def with_images(chat: Chat, given: list[Source]) -> tuple[Chat, tuple[Source, ...]]:
    """Return a chat whose images are parts ``{"type": "image"}``, and their sources in order.

    Args:
        chat: As `read_chat` returned it.
        given: The images of the column.

    Raises MalformedData unless every image has one place, and every place an image.
    """
    if given:
        chat = tuple(_with_parts(message) for message in chat)
    remaining = iter(given)
    num_places = 0
    filled = []
    for message in chat:
        content = message["content"]
        if isinstance(content, list):
            content = [dict(part) for part in content]
            for part in content:
                if part["type"] in IMAGE_TYPES and part.keys() == {"type"}:
                    num_places += 1
                    if (source := next(remaining, None)) is not None:
                        part["image"] = source
        filled.append({**message, "content": content})
    if num_places != len(given):
        refuse(
            COLUMN,
            f"expected an image for each of {num_places} places ({PLACEHOLDER} in a text, or a part of type image without one)",
            f"{len(given)}",
        )
    try:
        bare, sources = take_images(filled)
    except ImageRefused as err:
        refuse(COLUMN, "expected images that can be read", str(err))
    return tuple(bare), tuple(sources)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text" or PLACEHOLDER not in part["text"]:
            found.append(part)
            continue
        for number, text in enumerate(part["text"].split(PLACEHOLDER)):
            found += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": found if found != parts or isinstance(content, list) else content}


class ReadImages(NamedTuple):
    token_ids: list[int]  # with all tokens of the images
    places: RowImages | None = None
    files: tuple[AdmittedImage, ...] = ()  # each once
    sha256: bytes = b""  # of the images as the row gives them, in order; empty: it has none


@dataclass(frozen=True, slots=True)
class ImageRows:
    processor: ImageProcessor | None  # None: the model reads no images

    def read(self, row: PromptRow, token_ids: Sequence[int], folder: Path) -> ReadImages:
        """Return the prompt's token ids with those of all images, where these are, and what they are.

        Args:
            row: The prompt.
            token_ids: Of its text, with one placeholder for each image.
            folder: That of the data file, below which files of images are.

        Raises:
            MalformedData: For an image that is refused, a text that holds the placeholder's, a model that reads no images.
        """
        if self.processor is None:
            if row.images:
                raise MalformedData(
                    f"column {COLUMN}: {len(row.images)} images, and model.path reads text alone; use a model that reads images, or "
                    f'set data.ignore = ["{COLUMN}"] where they are in a column of their own'
                )
            return ReadImages(list(token_ids))
        try:
            given = [image_bytes(source, folder) for source in row.images]
            admitted = [admit(data) for data in given]
            ids, images = expanded(token_ids, admitted, self.processor)
        except ImageRefused as err:
            raise MalformedData(f"column {COLUMN}: {err}") from None
        if not given:
            return ReadImages(ids)
        digest = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in given)).digest()
        return ReadImages(ids, images, tuple({image.sha256: image for image in admitted}.values()), digest)
