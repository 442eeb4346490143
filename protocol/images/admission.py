"""Decode images from outside, once, within limits: the adapter of Pillow.

What is stored is what every later reader decodes to the same pixels: the original bytes, or PNG bytes of them where readers may
disagree (orientation in EXIF, transparency, a palette, more than 8 bits, CMYK).

Needs ``pillow``, the extra ``penstock[images]``.
"""

from __future__ import annotations

import functools
import hashlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ConfigError, ImageRefused
from penstock.protocol.facts import MAX_IMAGE_BYTES

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**25  # decoded: 96 MiB of RGB
MAX_RATIO = 200  # of the longer side to the shorter one
_ORIENTATION = 0x0112  # EXIF tag; 1: as stored
_SAME_EVERYWHERE = ("RGB", "L")  # modes; every other one is converted by each reader in its own way


@dataclass(frozen=True, slots=True)
class AdmittedImage:
    """An image that was decoded completely, as it is stored."""

    data: bytes
    sha256: str
    width: int
    height: int


def admit(data: bytes) -> AdmittedImage:
    """Decode an image from outside and return it as it is to be stored.

    Raises ImageRefused for another format than PNG, JPEG and WebP, for more than `MAX_IMAGE_BYTES` or `MAX_PIXELS`, for sides
    more than `MAX_RATIO` apart, for several frames, and for bytes that do not decode.
    """
    with _open(data) as image:
        _load(image)
        orientation = _orientation(image)  # a PNG may have it behind its pixels
        is_upright = orientation == 1
        if is_upright and image.mode in _SAME_EVERYWHERE and "transparency" not in image.info:
            return AdmittedImage(data, hashlib.sha256(data).hexdigest(), image.width, image.height)
        found = _on_white(image if is_upright else _upright(image, orientation))
        found.info = {}  # no orientation is written with the upright pixels
        sink = io.BytesIO()
        found.save(sink, "PNG", optimize=False)
    stored = sink.getvalue()
    if len(stored) > MAX_IMAGE_BYTES:
        raise ImageRefused(
            f"an image of {found.width} x {found.height} pixels has {len(stored)} bytes as PNG, at most {MAX_IMAGE_BYTES}; it was "
            "converted because of its orientation or colours: store it upright, as 8-bit RGB"
        )
    return AdmittedImage(stored, hashlib.sha256(stored).hexdigest(), found.width, found.height)


def pixels(data: bytes, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Return the pixels of an admitted image, [height, width, 3].

    Args:
        data: The bytes that `admit` returned.
        size: Width and height to resize to, with Pillow's bicubic filter; None: as stored.

    Raises ImageRefused as `admit` does.
    """
    with _open(data) as image:
        _load(image)
        whole = image.convert("RGB")
        if size is not None:
            whole = whole.resize(size, resample=_pillow().Resampling.BICUBIC)
        return np.array(whole)


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height of an admitted image, from its header; raises ImageRefused as `admit` does."""
    with _open(data) as image:
        return image.size


@functools.cache
def decoders() -> dict[str, str]:
    """Return the versions of what decodes and resizes: with others, the same bytes may give other pixels."""
    _pillow()
    import PIL  # noqa: PLC0415
    from PIL import features  # noqa: PLC0415

    return {"pillow": PIL.__version__, **{name: str(features.version(name)) for name in ("jpg", "webp")}}


def _pillow() -> Any:
    """Return Pillow's module of images."""
    try:
        from PIL import Image  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError('images need Pillow: pip install "penstock[images]"') from None
    return Image


def _open(data: bytes) -> Any:
    """Return an image of which only the header was read, within the limits."""
    if not 0 < len(data) <= MAX_IMAGE_BYTES:
        raise ImageRefused(f"an image of {len(data)} bytes, expected 1 to {MAX_IMAGE_BYTES}")
    module = _pillow()
    try:  # warnings are left alone: their filters are the whole process's, and images are decoded beside a training step
        image = module.open(io.BytesIO(data), formats=FORMATS)
        frames = getattr(image, "n_frames", 1)
    except Exception as err:  # noqa: BLE001  whatever Pillow raises for bytes from outside
        raise ImageRefused(
            f"{len(data)} bytes are no image in {', '.join(FORMATS)} ({_one_line(err)}); convert it to one of these"
        ) from None
    width, height = image.size
    if width * height > MAX_PIXELS or min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
        image.close()
        raise ImageRefused(
            f"an image of {width} x {height} pixels, expected at most {MAX_PIXELS} pixels, and no side more than {MAX_RATIO} times "
            "the other; make it smaller"
        )
    if frames != 1 and image.format != "MPO":  # a camera's JPEG with previews behind the first frame
        image.close()
        raise ImageRefused(f"an image of {frames} frames, expected one; save one frame of the animation")
    return image


def _load(image: Any) -> None:
    """Decode all pixels; raises ImageRefused for bytes that are cut off or broken."""
    try:
        image.load()
    except Exception as err:  # noqa: BLE001  whatever Pillow raises for bytes from outside
        raise ImageRefused(
            f"an image of {image.width} x {image.height} pixels does not decode ({_one_line(err)})"
        ) from None


def _orientation(image: Any) -> int:
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception as err:  # noqa: BLE001  EXIF from outside
        raise ImageRefused(f"the EXIF data of an image are not readable ({_one_line(err)}); remove them") from None
    return next((number for number in range(1, 9) if number == found), 1)  # it may be written as a fraction


def _upright(image: Any, orientation: int) -> Any:
    """Return an image turned as its orientation says; the other EXIF data, which may be broken, are not read."""
    turn = _pillow().Transpose
    return image.transpose(
        {
            2: turn.FLIP_LEFT_RIGHT,
            3: turn.ROTATE_180,
            4: turn.FLIP_TOP_BOTTOM,
            5: turn.TRANSPOSE,
            6: turn.ROTATE_270,
            7: turn.TRANSVERSE,
            8: turn.ROTATE_90,
        }[orientation]
    )


def _on_white(image: Any) -> Any:
    """Return an image as RGB, with white where it is transparent."""
    if image.mode == "I;16" or image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 257).convert("L")  # 16 bits to 8
    if "A" in image.getbands() or "transparency" in image.info:
        whole = image.convert("RGBA")
        white = _pillow().new("RGBA", whole.size, (255, 255, 255, 255))
        return _pillow().alpha_composite(white, whole).convert("RGB")
    return image.convert("RGB")


def _one_line(err: Exception) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
