"""Images from outside: what is stored decodes to the same pixels everywhere, and hostile bytes are refused."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.pictures import picture, picture_bytes

from penstock.protocol.errors import ImageRefused
from penstock.protocol.groups import MAX_IMAGE_BYTES
from penstock.protocol.images import admission


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_original_bytes_are_stored(kind: str) -> None:
    data = picture_bytes(kind=kind)
    found = admission.admit(data)
    assert found.data == data
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert (found.width, found.height) == (40, 32) == admission.size_of(data)
    assert admission.pixels(data).shape == (32, 40, 3)
    assert admission.pixels(data, (20, 10)).shape == (10, 20, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_every_orientation_is_turned_as_other_readers_turn_it(kind: str, orientation: int) -> None:
    """Readers that heed the orientation in EXIF and those that do not would see different pictures."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = picture_bytes(kind=kind, exif=exif)
    with Image.open(io.BytesIO(data)) as given:
        expected = np.array(ImageOps.exif_transpose(given))
    found = admission.admit(data)
    np.testing.assert_array_equal(admission.pixels(found.data), expected)
    with Image.open(io.BytesIO(found.data)) as stored:
        assert 0x0112 not in stored.getexif()
    assert (found.height, found.width) == expected.shape[:2]
    assert admission.admit(found.data).data == found.data != data  # nothing of it is left to convert


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (10, struct.pack("<ii", -1, 3)),  # a fraction below 0, where one of no sign is expected
        (1, b"\7\0\0\0"),
        (12, struct.pack("<d", 1e300)),
    ],
)
def test_a_rotated_photograph_with_odd_exif_is_admitted(kind: int, value: bytes) -> None:
    """What a camera wrote beside the orientation is not read: values that Pillow cannot write again ended the process."""
    entries = struct.pack("<HHII", 0x0112, 3, 1, 6) + struct.pack("<HHI", 0x011A, kind, 1)
    entries += value if len(value) == 4 else struct.pack("<I", 38)
    tiff = b"II*\0" + struct.pack("<IH", 8, 2) + entries + struct.pack("<I", 0) + value
    plain = picture_bytes(kind="JPEG")
    marker = b"\xff\xe1" + struct.pack(">H", 8 + len(tiff)) + b"Exif\0\0" + tiff
    found = admission.admit(plain[:2] + marker + plain[2:])
    np.testing.assert_array_equal(admission.pixels(found.data), np.rot90(admission.pixels(plain), k=-1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "I;16", "CMYK"])
def test_what_readers_convert_differently_is_stored_as_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 6), 0xFFFF, dtype=np.uint16))
    elif mode in ("RGBA", "LA"):
        image = Image.new(mode, (6, 4), 0)
    else:
        image = Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode)
    found = admission.admit(picture_bytes(image, "JPEG" if mode == "CMYK" else "PNG"))
    with Image.open(io.BytesIO(found.data)) as stored:
        assert (stored.format, stored.mode, stored.size) == ("PNG", "RGB", (6, 4))
    assert np.unique(admission.pixels(found.data)).tolist() == [255]


def _animated() -> bytes:
    return picture_bytes(kind="PNG", save_all=True, append_images=[picture(seed=1)])


def _cut(kind: str) -> bytes:
    data = picture_bytes(kind=kind)
    return data[: len(data) * 2 // 3]


def _bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims so many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes, expected 1 to"),
        (bytes(MAX_IMAGE_BYTES + 1), f"{MAX_IMAGE_BYTES + 1} bytes, expected 1 to"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in PNG, JPEG, WEBP"),
        (picture_bytes(kind="GIF"), "no image in PNG, JPEG, WEBP"),
        (picture_bytes(kind="BMP"), "no image in PNG, JPEG, WEBP"),
        (_bomb(8192, 4097), "8192 x 4097 pixels, expected at most"),
        (_bomb(50_000, 50_000), "no image in|pixels, expected at most"),
        (_bomb(402, 2), "no side more than 200 times"),
        (_bomb(64, 64), "does not decode"),
        (_cut("PNG"), "does not decode"),
        (_cut("JPEG"), "does not decode"),
        (_animated(), "2 frames, expected one"),
    ],
    ids=[
        "empty",
        "bytes",
        "svg",
        "gif",
        "bmp",
        "pixels",
        "bomb",
        "ratio",
        "no-pixels",
        "cut-png",
        "cut-jpeg",
        "animated",
    ],
)
def test_a_hostile_image_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ImageRefused, match=words):
        admission.admit(data)
    if "frames" not in words and "decode" not in words:
        with pytest.raises(ImageRefused):
            admission.size_of(data)
