"""The images of chats and data rows: find them in messages, and read their bytes; nothing is ever fetched from a URL.

What a URL names may change between two attempts at a group, and between engine and trainer, and the address may be one that this
process should not call. So images come as bytes, as base64, or as files beside the data.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from penstock.protocol.errors import ImageRefused
from penstock.protocol.facts import MAX_IMAGE_BYTES

Source: TypeAlias = Any  # bytes, a text, or a mapping of these
IMAGE_TYPES = (
    "image",
    "image_url",
    "input_image",
)  # of parts of a message: transformers, OpenAI's chat and Responses APIs
_KEYS = ("image", "image_url", "source", "base64", "bytes", "path", "url")
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_MAX_PATH = 4096  # characters
_SHOWN = 80  # characters of a source in an error


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Source]]:
    """Return a chat whose parts of images say nothing but ``{"type": "image"}``, as templates read them, and their sources in order.

    Raises ImageRefused for a part that names no source.
    """
    found, sources = [], []
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
        found.append({**message, "content": content} if "content" in message else dict(message))
    return found, sources


def _source(part: Mapping[str, Any]) -> Source:
    for key in _KEYS:
        if part.get(key) is not None:
            return part[key] if key != "base64" else {"base64": part[key]}
    raise ImageRefused(
        f"a part of a message has type {part['type']!r} and no image; give it one of {', '.join(_KEYS)}, not {sorted(part)}"
    )


def image_bytes(source: Source, folder: Path | None = None) -> bytes:
    """Return the bytes of an image.

    Args:
        source: Bytes; a data URL with base64; the path of a file below ``folder``, relative to it; or a mapping with one of these as
            ``bytes`` (as Hugging Face datasets store images), ``base64`` or ``data`` (without the head of a data URL), ``url``, ``path``.
        folder: Where files may be read; None: nowhere.

    Raises:
        ImageRefused: For any other source, above all a URL of a network, and for a file that is not there or too large.
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
            f"an image is given by the URL {source[:_SHOWN]!r}: URLs are never fetched, because what they name may change; give "
            "its bytes, or a data URL with base64"
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
                raise ImageRefused(
                    f"an image is given as an object in an object, expected bytes, base64 or a path as {key}"
                )
            return image_bytes(value, folder)
    raise ImageRefused(
        f"an image is given as an object with {sorted(map(str, source))[:8]}, expected bytes, base64, url or path"
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
            f"an image is given as a text of {len(name)} characters, longer than a path: {name[:_SHOWN]!r}; write base64 as a data URL, or "
            'as "base64"'
        )
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ImageRefused(
                f"{name}: not below {folder}; move the image there, and name it relative to the data file"
            )
        if not path.is_file():
            raise ImageRefused(f"{path}: no such file")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise ImageRefused(f"{path}: {size} bytes, an image may have {MAX_IMAGE_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as err:  # a name that is none, such as one too long, or a file that may not be read
        reason = err.strerror if isinstance(err, OSError) else err
        raise ImageRefused(
            f"{name[:_SHOWN]!r}: not readable as a file below {folder} ({reason}); where it is base64 and no path, write a data URL, "
            'or "base64" beside it'
        ) from None
