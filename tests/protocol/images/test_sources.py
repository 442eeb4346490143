"""Where images come from: bytes, base64 and files beside the data; never a URL."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.pictures import picture_bytes

from penstock.protocol.errors import ImageRefused
from penstock.protocol.images.admission import image_bytes, take_images

DATA = picture_bytes()
TEXT = base64.b64encode(DATA).decode()


def _nested(depth: int) -> dict[str, Any]:
    return {"url": _nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "source",
    [
        DATA,
        bytearray(DATA),
        f"data:image/png;base64,{TEXT}",
        {"bytes": DATA, "path": None},  # as Hugging Face datasets store it
        {"bytes": DATA, "path": "gone.png"},
        {"base64": TEXT},
        {"type": "base64", "media_type": "image/png", "data": TEXT},
        {"url": f"data:image/png;base64,{TEXT}", "detail": "auto"},
        "below/one.png",
        {"bytes": None, "path": "below/one.png"},
    ],
)
def test_every_form_gives_the_same_bytes(source: Any, tmp_path: Path) -> None:
    """Those of transformers, OpenAI, Anthropic, Hugging Face datasets, and files."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below/one.png").write_bytes(DATA)
    assert image_bytes(source, tmp_path) == DATA


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("https://example.org/one.png", "URLs are never fetched"),
        ("file:///etc/passwd", "URLs are never fetched"),
        ({"url": "http://127.0.0.1/"}, "URLs are never fetched"),
        ("../outside.png", "not below"),
        ("/etc/passwd", "not below"),
        ("gone.png", "no such file"),
        ("data:image/png;base64,@@", "not valid base64"),
        ({"base64": "A" * 30_000_000}, "characters of base64"),
        ({"file_id": "file-1"}, r"\['file_id'\], expected bytes"),
        ({"base64": "é"}, "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("A" * 300, "File name too long.*where it is base64"),  # transformers takes it without the head of a data URL
        ("/9j/" + "A" * 5000, "longer than a path.*write base64 as a data URL"),
        ("a\0b.png", "not readable as a file"),
        ("\ud800.png", "not readable as a file"),
        ({"url": {"url": {"url": "a"}}}, "an object in an object"),
        (_nested(600), "an object in an object"),
        (17, "given as int"),
        ("", "given as str"),
    ],
)
def test_anything_else_is_refused(source: Any, words: str, tmp_path: Path) -> None:
    """A URL above all: what it names may change, and the address may be one that is not to be called."""
    (tmp_path.parent / "outside.png").write_bytes(DATA)
    with pytest.raises(ImageRefused, match=words):
        image_bytes(source, tmp_path)


def test_without_a_folder_no_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(DATA)
    with pytest.raises(ImageRefused, match="expected a data URL"):
        image_bytes(str(tmp_path / "one.png"))


def test_images_are_taken_out_of_messages_in_order() -> None:
    """The template sees parts without their content, as transformers' templates expect them."""
    messages = [
        {"role": "system", "content": "look"},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": [{"type": "image", "base64": "AA=="}]},
    ]
    found, sources = take_images(messages)
    assert sources == ["a.png", {"url": "data:image/png;base64,AA=="}, {"base64": "AA=="}]
    assert found[1]["content"] == [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    assert found[3]["content"] == [{"type": "image"}]
    assert (found[0], found[2]) == (messages[0], messages[2])
    with pytest.raises(ImageRefused, match=r"no image; give it one of"):
        take_images([{"role": "user", "content": [{"type": "image"}]}])
