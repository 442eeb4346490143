"""Reads the images of rows: their bytes, decoded once within limits, and the tokens that stand for them in the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.protocol.errors import ImageRefused
from penstock.protocol.facts import RowImages
from penstock.protocol.images.admission import AdmittedImage, admit, image_bytes
from penstock.protocol.images.processor import ImageProcessor, expanded
from penstock.trainer.data.read_rows import PromptRow
from penstock.trainer.data.row_images import COLUMN
from penstock.trainer.errors import MalformedData


class ReadImages(NamedTuple):
    """A row's prompt with its images."""

    token_ids: list[int]  # with all tokens of the images
    places: RowImages | None = None
    files: tuple[AdmittedImage, ...] = ()  # each once
    sha256: bytes = (
        b""  # of the images as the row gives them, in order, whatever they are stored as; empty: it has none
    )


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Reads the images of rows for one model."""

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
