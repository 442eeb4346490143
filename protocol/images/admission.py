"""Find the images of chats and data rows, decode them once, within limits: the adapter of Pillow (extra ``images``).

Images come as bytes, as base64, or as files beside the data; nothing is fetched from a URL. What a URL names may change
between two attempts at a group, and between engine and trainer, and the address may be none to call.

What is stored is what every later reader decodes to the same pixels: the original bytes, or PNG bytes of them where
readers may disagree (orientation in EXIF, transparency, a palette, more than 8 bits, CMYK).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ConfigError, ImageRefused
from penstock.protocol.groups import MAX_IMAGE_BYTES

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**25  # decoded: 96 MiB of RGB
MAX_RATIO = 200  # of the longer side to the shorter one
_ORIENTATION = 0x0112  # EXIF tag; 1: as stored
_SAME_EVERYWHERE = ("RGB", "L")  # modes; every other one is converted by each reader differently
Source: TypeAlias = Any  # bytes, a text, or a mapping of these
# of parts of a message: transformers, OpenAI's chat and Responses APIs
IMAGE_TYPES = "image", "image_url", "input_image"
_KEYS = ("image", "image_url", "source", "base64", "bytes", "path", "url")
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_MAX_PATH = 4096  # characters
_SHOWN = 80  # characters of a source in an error


@dataclass(frozen=True, slots=True)
class AdmittedImage:
    """An image that was decoded completely, as it is stored."""

    data: bytes
    sha256: str
    width: int
    height: int


def admit(data: bytes) -> AdmittedImage:
    """Decode an image from outside and return it as it is to be stored.

    Raises ImageRefused for another format than PNG, JPEG and WebP, for more than `MAX_IMAGE_BYTES` or `MAX_PIXELS`, for
    sides more than `MAX_RATIO` apart, for several frames, and for bytes that do not decode.
    """
    with _open(data) as image:
        _load(image)
        orientation = _orientation(image)  # a PNG may have it behind its pixels
        is_upright = orientation == 1
        if is_upright and image.mode in _SAME_EVERYWHERE and "transparency" not in image.info:
            return AdmittedImage(data, hashlib.sha256(data).hexdigest(), image.width, image.height)
        converted = _on_white(image if is_upright else _upright(image, orientation))
        converted.info = {}  # no orientation is written with the upright pixels
        sink = io.BytesIO()
        converted.save(sink, "PNG", optimize=False)
    stored = sink.getvalue()
    if len(stored) > MAX_IMAGE_BYTES:
        raise ImageRefused(
            f"an image of {converted.width} x {converted.height} pixels has {len(stored)} bytes as PNG, at most "
            f"{MAX_IMAGE_BYTES}; it was converted for its orientation or colours: store it upright, as 8-bit RGB"
        )
    return AdmittedImage(stored, hashlib.sha256(stored).hexdigest(), converted.width, converted.height)


def pixels(data: bytes, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Return the pixels of an admitted image, [height, width, 3]; raises ImageRefused as `admit` does.

    ``size`` is width and height to resize to, with Pillow's bicubic filter; None: as stored.
    """
    with _open(data) as image:
        _load(image)
        whole = image.convert("RGB")
        if size is not None:
            whole = whole.resize(size, resample=_pillow().Resampling.BICUBIC)
        return np.array(whole)


def size_of(data: bytes) -> tuple[int, int]:
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
    try:
        from PIL import Image  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError('images need Pillow: pip install "penstock[images]"') from None
    return Image


def _open(data: bytes) -> Any:
    if not 0 < len(data) <= MAX_IMAGE_BYTES:
        raise ImageRefused(f"an image of {len(data)} bytes, expected 1 to {MAX_IMAGE_BYTES}")
    module = _pillow()
    # Warnings are left alone: their filters are the whole process's, and images are decoded beside a training step.
    with _refusing(f"{len(data)} bytes are no image in {', '.join(FORMATS)}", "; convert it to one of these"):
        image = module.open(io.BytesIO(data), formats=FORMATS)
        frames = getattr(image, "n_frames", 1)
    width, height = image.size
    if width * height > MAX_PIXELS or min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
        image.close()
        raise ImageRefused(
            f"an image of {width} x {height} pixels, expected at most {MAX_PIXELS} pixels, and no side more than "
            f"{MAX_RATIO} times the other; make it smaller"
        )
    if frames != 1 and image.format != "MPO":  # a camera's JPEG with previews behind the first frame
        image.close()
        raise ImageRefused(f"an image of {frames} frames, expected one; save one frame of the animation")
    return image


def _load(image: Any) -> None:
    with _refusing(f"an image of {image.width} x {image.height} pixels does not decode"):
        image.load()


def _orientation(image: Any) -> int:
    with _refusing("the EXIF data of an image are not readable", "; remove them"):
        orientation = image.getexif().get(_ORIENTATION, 1)
    return next((number for number in range(1, 9) if number == orientation), 1)  # it may be written as a fraction


def _upright(image: Any, orientation: int) -> Any:
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
    if image.mode == "I;16" or image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 257).convert("L")  # 16 bits to 8
    if "A" in image.getbands() or "transparency" in image.info:
        whole = image.convert("RGBA")
        white = _pillow().new("RGBA", whole.size, (255, 255, 255, 255))
        return _pillow().alpha_composite(white, whole).convert("RGB")
    return image.convert("RGB")


@contextlib.contextmanager
def _refusing(problem: str, fix: str = "") -> Iterator[None]:
    """Raise ImageRefused for whatever Pillow raises in the block for bytes from outside."""
    try:
        yield
    except Exception as err:  # noqa: BLE001
        reason = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
        raise ImageRefused(f"{problem} ({reason}){fix}") from None


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Source]]:
    """Return a chat with ``{"type": "image"}`` for each image, as templates read it, and the sources in order.

    Raises ImageRefused for a part that names no source.
    """
    chat, sources = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
                    sources.append(_source(part))
                    parts.append({"type": "image"})
                else:
                    parts.append(part)
            content = parts
        chat.append({**message, "content": content} if "content" in message else dict(message))
    return chat, sources


def _source(part: Mapping[str, Any]) -> Source:
    for key in _KEYS:
        if part.get(key) is not None:
            return part[key] if key != "base64" else {"base64": part[key]}
    raise ImageRefused(
        f"a message's part has type {part['type']!r}, no image; give it one of {', '.join(_KEYS)}, not {sorted(part)}"
    )


def image_bytes(source: Source, folder: Path | None = None) -> bytes:
    """Return the bytes of an image; raises ImageRefused for a missing or too large file, and for a URL.

    A source is bytes; a data URL with base64; the path of a file below ``folder``, relative to it (None: no files are
    read); or a mapping with one of these as ``bytes`` (as Hugging Face datasets store images), ``base64`` or ``data``
    (without the head of a data URL), ``url``, ``path``.
    """
    if isinstance(source, Mapping):
        return _of_mapping(source, folder)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str) or not source:
        raise ImageRefused(f"an image is given as {type(source).__name__}, expected bytes, base64 or a path")
    if head := _DATA_URL.match(source):
        return _of_base64(source[head.end() :])
    if _URL.match(source):
        raise ImageRefused(
            f"an image is given by the URL {source[:_SHOWN]!r}: URLs are never fetched, because what they name may "
            "change; give its bytes, or a data URL with base64"
        )
    if folder is None:
        raise ImageRefused(f"an image is given as the text {source[:_SHOWN]!r}, expected a data URL with base64")
    return _of_file(source, folder)


def _of_mapping(source: Mapping[str, Any], folder: Path | None) -> bytes:
    for key in ("base64", "data"):
        if isinstance(text := source.get(key), str):
            return _of_base64(text)
    for key in ("bytes", "url", "path"):
        if (value := source.get(key)) is not None:
            if isinstance(value, Mapping):  # as deep as a sender likes
                raise ImageRefused(f"an image is an object in an object, expected bytes, base64 or a path as {key}")
            return image_bytes(value, folder)
    raise ImageRefused(
        f"an image is an object with {sorted(map(str, source))[:8]}, expected bytes, base64, url or path"
    )


def _of_base64(text: str) -> bytes:
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise ImageRefused(f"{len(text)} characters of base64, an image may have {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as err:  # binascii.Error is one; characters beyond ASCII raise another
        raise ImageRefused(f"an image is not valid base64 ({err}): {text[:_SHOWN]!r}") from None


def _of_file(name: str, folder: Path) -> bytes:
    if len(name) > _MAX_PATH:
        raise ImageRefused(
            f"an image is given as a text of {len(name)} characters, longer than a path: {name[:_SHOWN]!r}; write "
            'base64 as a data URL, or as "base64"'
        )
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ImageRefused(f"{name}: not below {folder}; move it there, and name it relative to the data file")
        if not path.is_file():
            raise ImageRefused(f"{path}: no such file")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise ImageRefused(f"{path}: {size} bytes, an image may have {MAX_IMAGE_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as err:  # a name that is none, such as one too long, or a file that may not be read
        reason = err.strerror if isinstance(err, OSError) else err
        raise ImageRefused(
            f"{name[:_SHOWN]!r}: not readable as a file below {folder} ({reason}); where it is base64 and no path, "
            'write a data URL, or "base64" beside it'
        ) from None
