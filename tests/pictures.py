"""Small pictures, made on the spot."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(
    width: int = 40, height: int = 32, *, colour: tuple[int, int, int] | None = None, seed: int = 0
) -> Image.Image:
    """A picture of one colour, or of random pixels."""
    if colour is not None:
        return Image.new("RGB", (width, height), colour)
    values = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def picture_bytes(image: Image.Image | None = None, kind: str = "PNG", **options: Any) -> bytes:
    """A picture in a file format."""
    sink = io.BytesIO()
    (picture() if image is None else image).save(sink, kind, **options)
    return sink.getvalue()
