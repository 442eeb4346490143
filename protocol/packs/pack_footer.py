"""The row groups in a Parquet footer, read without Parquet's reader; pure.

pyarrow's reader cannot replace this one: its view of a column chunk (26.0.1) ends the process, by an exception that C++ does
not catch, where a chunk is encrypted or its size statistics have another length than its levels. So the numbers of the chunks are
read here, and such chunks are refused before pyarrow sees them. What Thrift's compact encoding says twice, the last decides, as in Thrift's reader.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.protocol.errors import PackError

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
_MAX_DEPTH = 16
_MAX_VALUES = 2**20  # of a footer: what a hostile one makes of memory is about 100 bytes for each
_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_ONE = rb"[\x00-\x7f]"


@dataclass(frozen=True, slots=True)
class StoredColumn:
    path: str
    width: int  # of a decoded value, in bytes
    is_text: bool
    max_repetition_level: int
    max_definition_level: int

    @property
    def is_list(self) -> bool:
        return self.max_repetition_level > 0


class Chunk(NamedTuple):
    num_values: int
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int | None


class RowGroup(NamedTuple):
    num_rows: int
    chunks: list[Chunk]  # by column


def row_groups(data: Any, start: int, columns: Sequence[StoredColumn]) -> list[RowGroup]:
    """Return the row groups of the footer at ``start``; raises PackError unless each has a readable chunk of every column."""
    try:
        footer, _ = _Fields(data, columns).struct(start, 0)
        return [_row_group(fields, columns) for fields in footer.get((4, _LIST), [])]
    except IndexError:
        raise PackError("the Parquet footer ends within a field") from None
    except KeyError as err:
        raise PackError(f"the Parquet footer is not that of a pack: no field of number and type {err}") from None
    except TypeError:
        raise PackError("the Parquet footer is not that of a pack: a list holds values of another type") from None


def thrift_struct(data: Any, position: int) -> tuple[dict[tuple[int, int], Any], int]:
    """Return the fields of a struct in Thrift's compact encoding, by number and type, and where it ends; raises PackError, IndexError."""
    return _Fields(data, ()).struct(position, 0)


def _row_group(fields: dict[tuple[int, int], Any], columns: Sequence[StoredColumn]) -> RowGroup:
    column_list = fields[1, _LIST]
    if len(column_list) != len(columns):
        raise PackError(f"a row group has {len(column_list)} columns, its schema has {len(columns)}")
    chunks = [
        chunk if isinstance(chunk, Chunk) else _chunk(chunk, column)
        for chunk, column in zip(column_list, columns, strict=True)
    ]
    return RowGroup(fields[3, _I64], chunks)


def _chunk(fields: dict[tuple[int, int], Any], column: StoredColumn) -> Chunk:
    if any(number in (8, 9) for number, _ in fields):
        raise PackError(f"column {column.path} is encrypted, which packs are not")
    meta = fields[3, _STRUCT]
    sizes = meta.get((16, _STRUCT), {})
    levels = [(2, column.max_repetition_level), (3, column.max_definition_level)]
    if any(len(sizes.get((field, _LIST), [])) not in (0, most + 1) for field, most in levels) or (
        (1, _I64) in sizes and not column.is_text
    ):
        raise PackError(f"column {column.path} has size statistics that are not of its type")
    return Chunk(meta[5, _I64], meta[7, _I64], meta[9, _I64], meta.get((11, _I64)))


@functools.cache
def _written_form(column: StoredColumn) -> re.Pattern[bytes]:
    """Return the bytes of a column's `ColumnChunk` as our writer encodes them: groups 1 to 4 are the numbers of a `Chunk`.

    It saves the reading field by field, which costs more than decoding a small group.
    """
    parts = [part.encode() for part in column.path.split(".")]
    path = bytes([len(parts) << 4 | _BINARY]) + b"".join(bytes([len(part)]) + part for part in parts)
    repetitions, definitions = (
        rb"(?:\x06|%b%b)" % (re.escape(bytes([most + 1 << 4 | _I64])), _VARINT * (most + 1))
        for most in (column.max_repetition_level, column.max_definition_level)
    )
    before = rb"\x16%b\x19" % _VARINT if column.is_text else rb"\x29"  # the bytes of texts, for texts only
    encodings = rb"(?:\x15%b|\x25%b|\x35%b|\x45%b)" % tuple(_ONE * count for count in (1, 2, 3, 4))
    page_counts = rb"\x15%b\x15%b\x15%b\x00" % (_ONE, _ONE, _VARINT)
    counts = rb"(?:\x1c%b|\x2c%b|\x3c%b)" % tuple(page_counts * count for count in (1, 2, 3))
    return re.compile(
        rb"\x26%b\x1c\x15%b\x19%b\x19%b\x15%b" % (_VARINT, _ONE, encodings, re.escape(path), _ONE)
        + rb"\x16(%b)\x16%b\x16(%b)\x26(%b)" % (_VARINT, _VARINT, _VARINT, _VARINT)
        + rb"(?:\x49|\x26(%b)\x29)%b" % (_VARINT, counts)
        + rb"(?:\x3c%b%b\x19%b\x00)?\x00\x00" % (before, repetitions, definitions),
        re.DOTALL,
    )


class _Fields:
    def __init__(self, data: Any, columns: Sequence[StoredColumn]) -> None:
        self._data = data
        self._forms = [_written_form(column) for column in columns]
        self._left = _MAX_VALUES

    def struct(self, position: int, depth: int) -> tuple[dict[tuple[int, int], Any], int]:
        if depth > _MAX_DEPTH:
            raise PackError(f"the Parquet footer is nested deeper than {_MAX_DEPTH}")
        fields: dict[tuple[int, int], Any] = {}
        number = 0
        while header := self._data[position]:
            position += 1
            kind = header & 0x0F
            if header >> 4:
                number += header >> 4
            else:
                number, position = self._integer(position)
            if kind in (_TRUE, _FALSE):
                fields[number, kind] = kind == _TRUE
            else:
                is_chunks = depth == 1 and number == 1  # the columns of a row group
                fields[number, kind], position = self._value(kind, position, depth, self._forms if is_chunks else ())
        return fields, position + 1

    def _value(self, kind: int, position: int, depth: int, forms: Sequence[re.Pattern[bytes]] = ()) -> tuple[Any, int]:
        self._left -= 1
        if self._left < 0:
            raise PackError(f"the Parquet footer has more than {_MAX_VALUES} values")
        if kind in (_I16, _I32, _I64):
            return self._integer(position)
        if kind == _STRUCT:
            return self.struct(position, depth + 1)
        if kind in (_LIST, _SET):
            return self._list(position, depth, forms)
        if kind == _BINARY:
            size, position = self._varint(position)
            return self._bytes(position, size), position + size
        if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):  # a bool of a list has a separate byte
            size = 8 if kind == _DOUBLE else 1
            return self._bytes(position, size), position + size
        raise PackError(f"the Parquet footer has a field of type {kind}, which packs do not use, at byte {position}")

    def _list(self, position: int, depth: int, forms: Sequence[re.Pattern[bytes]]) -> tuple[list[Any], int]:
        header = self._data[position]
        position += 1
        size, kind = header >> 4, header & 0x0F
        if size == 15:
            size, position = self._varint(position)
        if kind in (_LIST, _SET):  # without end, a recursion
            raise PackError("the Parquet footer has a list of lists, which Parquet does not use")
        values: list[Any] = []
        for number in range(size):
            form = forms[number].match(self._data, position) if number < len(forms) and kind == _STRUCT else None
            if form is not None:
                value, position = _written_chunk(form), form.end()
            else:
                value, position = self._value(kind, position, depth)
            values.append(value)
        return values, position

    def _integer(self, position: int) -> tuple[int, int]:
        number, position = self._varint(position)
        return number >> 1 ^ -(number & 1), position

    def _varint(self, position: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            byte = self._data[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, position
            shift += 7
            if shift > 63:
                raise PackError(f"the Parquet footer has an integer of more than 64 bits, at byte {position}")

    def _bytes(self, position: int, size: int) -> bytes:
        if position + size > len(self._data):
            raise PackError(f"the Parquet footer has {size} bytes at byte {position}, beyond its end")
        return self._data[position : position + size]


def _written_chunk(match: re.Match[bytes]) -> Chunk:
    num_values, size, data_page, dictionary_page = match.groups()
    return Chunk(
        signed(num_values),
        signed(size),
        signed(data_page),
        None if dictionary_page is None else signed(dictionary_page),
    )


def unsigned(varint: bytes) -> int:
    number = 0
    for byte in reversed(varint):
        number = number << 7 | byte & 0x7F
    return number


def signed(varint: bytes) -> int:
    number = unsigned(varint)
    return number >> 1 ^ -(number & 1)
