"""Small pictures, made on the spot."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 40, height: int = 32, *, colour: tuple[int, ...] | None = None, seed: int = 0) -> Image.Image:
    if colour is not None:
        return Image.new("RGB", (width, height), colour)
    values = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def picture_bytes(image: Image.Image | None = None, kind: str = "PNG", **options: Any) -> bytes:
    sink = io.BytesIO()
    (picture() if image is None else image).save(sink, kind, **options)
    return sink.getvalue()
