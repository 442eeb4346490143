"""Pages of a Parquet column, written byte by byte: each claim of their headers that no real writer makes is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.errors import PackError
from penstock.protocol.packs import pack_bounds
from penstock.protocol.packs.pack_footer import Chunk, StoredColumn

START = 4  # behind the magic bytes
LIMIT = 10**9
NUMBERS = StoredColumn("numbers", width=4, is_text=False, max_repetition_level=0, max_definition_level=0)
LISTS = StoredColumn("lists.list.element", width=4, is_text=False, max_repetition_level=1, max_definition_level=1)
TEXTS = StoredColumn("texts", width=4, is_text=True, max_repetition_level=0, max_definition_level=0)
PLAIN, DICTIONARY = 0, 8


def varint(number: int) -> bytes:
    number = number * 2 if number >= 0 else -number * 2 - 1
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def data_page(values: int, *, encoding: int = PLAIN, size: int = 8, stored: int = 8) -> bytes:
    header = b"\x15\x00\x15" + varint(size) + b"\x15" + varint(stored) + b"\x2c\x15" + varint(values)
    return header + bytes([0x15, encoding << 1 & 0x7F]) + b"\x15\x06\x15\x06\x00\x00" + b"x" * max(stored, 0)


def dictionary_page(values: int, *, size: int = 8, stored: int = 8) -> bytes:
    header = b"\x15\x04\x15" + varint(size) + b"\x15" + varint(stored) + b"\x4c\x15" + varint(values)
    return header + b"\x15\x00\x00\x00" + b"x" * stored


def column_bytes(pages: bytes, column: StoredColumn, *, rows: int, **claims: Any) -> int:
    """What decoding may allocate; ``claims`` are of the footer, true unless given."""
    data = b"PAR1" + pages + b"footer"
    chunk = {"num_values": rows, "data_page_offset": START, "dictionary_page_offset": None}
    chunk |= {"total_compressed_size": len(pages)} | claims
    return pack_bounds._column_bytes(data, Chunk(**chunk), column, rows, LIMIT)


def test_honest_pages_are_counted() -> None:
    """Two data pages, and a dictionary before a data page: values, pages and what a text of the dictionary may repeat."""
    assert column_bytes(data_page(2) + data_page(1), NUMBERS, rows=3) == 3 * 4 + 2 * 8
    pages = dictionary_page(1, size=100) + data_page(5, encoding=DICTIONARY)
    found = column_bytes(pages, TEXTS, rows=5, data_page_offset=START + len(pages) - 1, dictionary_page_offset=START)
    assert found == 5 * 4 + 4 * 1 + 100 + 5 * 100 + 8


@pytest.mark.parametrize(
    ("column", "claims"),
    [
        (NUMBERS, {"data_page_offset": 2}),
        (NUMBERS, {"data_page_offset": -5}),
        (NUMBERS, {"total_compressed_size": 0}),
        (NUMBERS, {"total_compressed_size": 10**12}),
        (NUMBERS, {"num_values": 4}),
        (LISTS, {"num_values": 2}),
    ],
)
def test_a_column_whose_place_or_number_cannot_be_is_refused(column: StoredColumn, claims: dict[str, int]) -> None:
    """Before the file, without bytes, beyond its end, and with another number of values than its rows can have."""
    with pytest.raises(PackError, match="values in 3 rows, in bytes"):
        column_bytes(data_page(3), column, rows=3, **claims)


def test_a_dictionary_after_the_first_page_is_refused() -> None:
    with pytest.raises(PackError, match="dictionary after its first page"):
        column_bytes(data_page(1) + dictionary_page(1) + data_page(2), NUMBERS, rows=3)


def test_a_text_of_a_dictionary_counts_for_every_value() -> None:
    """A page of a few bytes stands for a long text as often as it has values."""
    pages = dictionary_page(1, size=10**6) + data_page(1000, encoding=DICTIONARY)
    claims = {"data_page_offset": START + len(pages) - 1, "dictionary_page_offset": START}
    assert column_bytes(pages, TEXTS, rows=1000, **claims) >= 10**9
    assert column_bytes(pages, NUMBERS, rows=1000, **claims) < 10**7  # numbers have a width


@pytest.mark.parametrize("claims", [{"size": -8}, {"stored": -8}])
def test_a_negative_size_is_refused(claims: dict[str, int]) -> None:
    """It would lower the sum of the pages, or move the reader back."""
    with pytest.raises(PackError, match="negative size"):
        column_bytes(data_page(3, **claims), NUMBERS, rows=3)
    with pytest.raises(PackError, match="negative size"):
        column_bytes(data_page(-3), NUMBERS, rows=3)
