"""What a Parquet or Arrow file may make its reader allocate, computed before any value is decoded.

The sizes in a footer are claims of the writer, and nothing is allocated by them. What pyarrow allocates by are the headers of pages,
the lengths in front of compressed buffers, and the numbers of values, so these are summed. Texts are read as dictionaries:
a few bytes of a file may stand for gigabytes of one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.protocol.packs.pack_footer import Chunk, StoredColumn, row_groups, thrift_struct

_I32, _STRUCT = 5, 12
_VALUE_BYTES = 16  # of a decoded value, with its levels
_DELTA_BYTE_ARRAY = 7  # texts as a part of the one before: a page of it may stand for any number of bytes
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2  # kinds of Arrow messages


def text_columns(schema: pq.ParquetSchema) -> list[str]:
    """Return the paths of all columns of bytes and texts, nested ones too."""
    leaves = [schema.column(number) for number in range(len(schema.names))]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def parquet_bytes(data: Any, schema: pq.ParquetSchema, limit: int) -> int:
    """Return an upper bound of the bytes that a Parquet file decodes to, texts as dictionaries; counted until it exceeds ``limit``.

    ``data`` is the whole file. Raises PackError, ValueError or IndexError for a footer or page that is not read.
    """
    leaves = [schema.column(number) for number in range(len(schema.names))]
    columns = [
        StoredColumn(
            leaf.path, max(_VALUE_BYTES, leaf.length or 0), leaf.physical_type == "BYTE_ARRAY",
            leaf.max_repetition_level, leaf.max_definition_level,
        )
        for leaf in leaves
    ]  # fmt: skip
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if start < 4:
        raise ValueError("its footer is longer than the file")
    total = 0
    for group in row_groups(data, start, columns):
        for chunk, column in zip(group.chunks, columns, strict=True):
            if not group.num_rows and not chunk.num_values:  # its pages, which may have no place, are not read
                continue
            for size, num_values in _pages(data, chunk):
                total += size + num_values * column.width
                if total > limit:
                    return total
    return total


def _pages(data: Any, chunk: Chunk) -> Iterator[tuple[int, int]]:
    dictionary = chunk.dictionary_page_offset
    position = (
        dictionary if dictionary is not None and 0 < dictionary < chunk.data_page_offset else chunk.data_page_offset
    )
    end = position + chunk.total_compressed_size
    if not 4 <= position <= end <= len(data):
        raise ValueError(f"a column is in bytes {position} to {end} of {len(data)}")
    while position < end:
        fields, position = thrift_struct(data, position)
        header: dict[tuple[int, int], Any] = next((fields[n, _STRUCT] for n in (5, 7, 8) if (n, _STRUCT) in fields), {})
        size, stored, num_values = fields.get((2, _I32), 0), fields.get((3, _I32), 0), header.get((1, _I32), 0)
        encoding = header.get((4 if (8, _STRUCT) in fields else 2, _I32))
        if min(size, stored, num_values) < 0:
            raise ValueError("a page has a negative size")
        if encoding == _DELTA_BYTE_ARRAY:
            raise ValueError("it has pages in the encoding DELTA_BYTE_ARRAY; write it with another one")
        yield size, num_values
        position += stored


def arrow_bytes(messages: pa.ipc.MessageReader, limit: int) -> int:
    """Return the bytes that the compressed buffers of an Arrow stream decode to; counted until it exceeds ``limit``."""
    total = 0
    for message in messages:
        total += _buffer_bytes(message)
        if total > limit:
            break
    return total


def _buffer_bytes(message: pa.Message) -> int:
    metadata, body = message.metadata.to_pybytes(), message.body
    root = int.from_bytes(metadata[:4], "little")
    kind, batch = _field(metadata, root, 1), _table(metadata, root, 2)
    if metadata[kind : kind + 1] == bytes([_DICTIONARY_BATCH]):
        batch = _table(metadata, batch, 1)
    elif metadata[kind : kind + 1] != bytes([_RECORD_BATCH]):
        return 0
    if not _field(metadata, batch, 3):  # no compression
        return 0
    buffers, stored = _table(metadata, batch, 2), memoryview(body)
    total = 0
    for number in range(int.from_bytes(metadata[buffers : buffers + 4], "little")):
        at = buffers + 4 + 16 * number
        offset, length = (int.from_bytes(metadata[at + n : at + n + 8], "little", signed=True) for n in (0, 8))
        if length and not 0 <= offset <= len(stored) - 8:
            raise ValueError(f"a buffer at byte {offset} of {len(stored)}")
        total += max(0, int.from_bytes(stored[offset : offset + 8], "little", signed=True)) if length else 0
    return total


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a flatbuffer's table lies; 0: it is left out."""
    vtable = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    at = vtable + 4 + 2 * number
    if not 0 <= vtable <= len(data) - 4 or at >= vtable + int.from_bytes(data[vtable : vtable + 2], "little"):
        return 0
    offset = int.from_bytes(data[at : at + 2], "little")
    return table + offset if offset else 0


def _table(data: bytes, table: int, number: int) -> int:
    at = _field(data, table, number)
    return at + int.from_bytes(data[at : at + 4], "little")


def refused_type(types: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return a type whose values may overlap, so that a row of it may be longer than the file; None if there is none."""
    remaining = list(types)
    while remaining:
        kind = remaining.pop()
        is_nested_text = pa.types.is_dictionary(kind) and pa.types.is_nested(kind.value_type)
        if "view" in str(kind) or pa.types.is_run_end_encoded(kind) or is_nested_text:
            return kind
        remaining += [kind.field(number).type for number in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    return None


def row_bytes(array: pa.Array | pa.ChunkedArray) -> int:
    """Return the bytes of an array as values of their own: a text counts wherever it is used."""
    if isinstance(array, pa.ChunkedArray):
        return sum(map(row_bytes, array.chunks))
    if isinstance(array, pa.ExtensionArray):
        return row_bytes(array.storage)
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary]) if _is_text(array.dictionary.type) else None
        texts = (
            8 * len(array) if lengths is None else pc.call_function("sum", [lengths.take(array.indices)]).as_py() or 0
        )
        return texts + array.indices.nbytes
    if isinstance(array, pa.StructArray):
        return sum(map(row_bytes, array.flatten()))
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray | pa.MapArray):
        values = array.flatten() if not isinstance(array, pa.MapArray) else None
        return row_bytes(values) if values is not None else row_bytes(array.keys) + row_bytes(array.items)
    return array.nbytes


def _is_text(kind: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)
