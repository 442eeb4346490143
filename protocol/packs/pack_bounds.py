"""What a Parquet object may make its reader allocate and compute, checked before any of its values is decoded; pure.

The numbers in a file's footer are claims of its writer, and so are those in its page headers: Parquet's reader
allocates what they claim, and a page of a few bytes can stand for 10^9 values (run lengths, dictionaries, zstd). So
every page of the columns to read is visited without decoding it, and the sum of what the pages claim is bounded by what
the message promises. A page of any form that our writer does not produce is refused.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.errors import PackError
from penstock.protocol.groups import BlobRef, GeneratedGroup
from penstock.protocol.packs.pack_footer import Chunk, RowGroup, StoredColumn, unsigned

MAX_ROWS = 4097  # of a group: the largest group_size of a task, and its baseline; of episodes, all their rows together
MAX_ROW_TOKENS = 2**25  # of all rows of a group's episodes, shared beginnings counted in each
MAX_ROW_GROUPS = 4096
MAX_BYTES = 512 * 1024**2  # decoded at a time, whatever a message promises
_MIN_BYTES = 64 * 1024**2  # texts, and unit tests in the ground truth, are not promised by a message
_BYTES_PER_TOKEN = 64  # of ids, mask, log-probabilities and text; leaves room for tokens that were not sampled
_BYTES_PER_NUMBER = 16  # of a teacher: the value, its levels, and its part of a page
_MAX_SCHEMA_ELEMENTS = 80  # a pack of episodes with a teacher and images has 73

# Of a decoded value, in bytes.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
_LEVEL_BYTES = 4  # a definition and a repetition level
_PLAIN, _BYTE_STREAM_SPLIT, _DICTIONARY = 0, 18, (4, 16)  # encodings as zigzag varints; plain and RLE dictionaries

# The Thrift compact encoding of a page header, field by field: type, uncompressed and compressed size, then the header
# of a data page (number of values, encoding, encodings of levels, statistics) or a dictionary (number, encoding).
_VARINT = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_PAGE = re.compile(
    rb"\x15(?:\x00\x15(V)\x15(V)\x2c\x15(V)\x15([\x00-\x7f])\x15\x06\x15\x06(?:\x1c\x00)?(?:\x00\x00|(\x1c))"
    rb"|\x04\x15(V)\x15(V)\x4c\x15(V)\x15[\x00\x04][\x11\x12]?\x00\x00)".replace(b"V", _VARINT),
    re.DOTALL,
)
_ONE_VARINT = re.compile(_VARINT)
_FOOTER = re.compile(rb"\x15[\x02\x04]\x19(?:([\x0c-\xec])|\xfc([\x00-\x7f]))", re.DOTALL)


def max_bytes(groups: Sequence[GeneratedGroup] | None) -> int:
    """Return how many bytes a pack of a message's groups may hold or decode to; `MAX_BYTES` without a message."""
    if groups is None:
        return MAX_BYTES
    tokens = sum(map(_row_tokens, groups))
    taught = (group for group in groups if group.teacher_top_k is not None)
    of_teachers = sum((1 + 2 * (group.teacher_top_k or 0)) * sum(group.completion_tokens) for group in taught)
    of_experts = sum(g.routers.bytes_per_token * _row_tokens(g) for g in groups if g.routers is not None)
    return min(MAX_BYTES, _MIN_BYTES + _BYTES_PER_TOKEN * tokens + _BYTES_PER_NUMBER * of_teachers + of_experts)


def _row_tokens(group: GeneratedGroup) -> int:
    if group.row_tokens is not None:
        return group.row_tokens
    return group.prompt_tokens * len(group.completion_tokens) + sum(group.completion_tokens)


def check_message(pack: BlobRef, groups: Sequence[GeneratedGroup]) -> None:
    """Raise PackError for a message whose pack must not be fetched: too large, or its groups contradict each other."""
    limit = max_bytes(groups)
    if pack.size_bytes > limit:
        raise PackError(
            f"{pack.key} has {pack.size_bytes} bytes, at most {limit} for the tokens that its message names"
        )
    for what, values in (("id", [g.group_id for g in groups]), ("row group", [g.row_group for g in groups])):
        if len(set(values)) != len(values):
            raise PackError(f"two groups of the message of {pack.key} have the same {what}: {values[:8]}")
    for group in groups:
        if group.num_rows > MAX_ROWS or (group.row_tokens or 0) > MAX_ROW_TOKENS:
            raise PackError(
                f"{group.group_id} has {group.num_rows} rows of {group.row_tokens} tokens, at most {MAX_ROWS} rows "
                f"of {MAX_ROW_TOKENS}"
            )


def check_footer(data: bytes) -> int:
    """Return where an object's Parquet footer begins; raises PackError for a schema larger than that of a pack."""
    size = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1" or size > len(data) - 12:
        raise PackError(f"not a Parquet object (its magic bytes or its footer's size are wrong); {len(data)} bytes")
    start = len(data) - 8 - size
    footer = _FOOTER.match(data, start)
    if footer is None or (footer[2] is not None and footer[2][0] > _MAX_SCHEMA_ELEMENTS):
        raise PackError(
            f"the Parquet footer is not that of a pack: no schema, or more than {_MAX_SCHEMA_ELEMENTS} elements in it"
        )
    return start


def check_schema(
    file: pq.ParquetFile, accepted: Collection[pa.Schema], keys: Collection[bytes]
) -> tuple[StoredColumn, ...]:
    """Return the columns of a file; raises PackError unless they are exactly those of one of the ``accepted`` schemas.

    ``keys`` are of the file's metadata; an Arrow schema changes the types that are read, so it must be the same.
    """
    schema = file.schema
    for known in accepted:
        expected, columns = _stored(known)
        if schema.equals(expected) and all(schema.column(i).path == c.path for i, c in enumerate(columns)):
            if b"ARROW:schema" not in keys or file.schema_arrow.equals(known):
                return columns
            break
    raise PackError(f"the columns are not those of a pack: {str(file.schema_arrow)[:600]}")


@functools.cache
def _stored(schema: pa.Schema) -> tuple[pq.ParquetSchema, tuple[StoredColumn, ...]]:
    sink = io.BytesIO()
    pq.ParquetWriter(sink, schema, store_schema=False).close()
    parquet_schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    leaves = [parquet_schema.column(i) for i in range(len(parquet_schema.names))]
    return parquet_schema, tuple(
        StoredColumn(
            leaf.path,
            _WIDTHS[leaf.physical_type],
            leaf.physical_type == "BYTE_ARRAY",
            leaf.max_repetition_level,
            leaf.max_definition_level,
        )
        for leaf in leaves
    )


def check_pages(
    data: bytes,
    stored: Sequence[RowGroup],
    row_groups: Sequence[int],
    columns: Sequence[tuple[int, StoredColumn]],
    groups: Sequence[GeneratedGroup] | None,
) -> list[int]:
    """Return the rows of each row group; raises PackError if reading the columns could allocate more than is promised.

    ``stored`` are all row groups of the footer, ``row_groups`` the numbers of those to read. ``columns`` are numbered
    as in the file; ``groups`` are the message's, in the order of ``row_groups``; None: no message describes it.
    """
    left, sizes = max_bytes(groups), []
    for position, number in enumerate(row_groups):
        if not 0 <= number < min(len(stored), MAX_ROW_GROUPS):
            raise PackError(f"row group {number} of a pack that has {len(stored)}")
        rows = stored[number].num_rows
        most = MAX_ROWS if groups is None else groups[position].num_rows
        if not 0 < rows <= most or (groups is not None and rows != most):
            expected = f"1 to {most}" if groups is None else most
            raise PackError(f"row group {number} has {rows} rows, expected {expected}")
        sizes.append(rows)
        for index, column in columns:
            left -= _column_bytes(data, stored[number].chunks[index], column, rows, left)
            if left < 0:
                raise PackError(
                    f"row groups {list(row_groups)[:8]} would decode to more than {max_bytes(groups)} bytes, the limit "
                    f"for the tokens that the message names; {len(data)} bytes are stored"
                )
    return sizes


def _column_bytes(data: bytes, chunk: Chunk, column: StoredColumn, rows: int, limit: int) -> int:
    """Return the most bytes that decoding a column allocates; raises PackError for a page not of our writer."""
    num_values = chunk.num_values
    start = position = chunk.data_page_offset
    dictionary_at = chunk.dictionary_page_offset
    if dictionary_at is not None and 0 < dictionary_at < start:
        start = position = dictionary_at
    end = start + chunk.total_compressed_size
    if not (4 <= start < end <= len(data) and (rows <= num_values if column.is_list else rows == num_values)):
        raise PackError(
            f"column {column.path}: {num_values} values in {rows} rows, in bytes {start}-{end} of {len(data)}"
        )
    total = num_values * (column.width + _LEVEL_BYTES * column.is_list)
    values = dictionary = 0
    while position < end and total <= limit:
        page_match = _PAGE.match(data, position)
        if page_match is None:
            raise PackError(f"column {column.path} has a page of a form that packs do not use, at byte {position}")
        page = _page(page_match[0])
        if page.is_dictionary:
            if position != start:
                raise PackError(f"column {column.path} has a dictionary after its first page")
            dictionary = page.size
            total += column.width * page.num_values
        else:
            values += page.num_values
            if page.uses_dictionary and column.is_text:
                total += dictionary * page.num_values
        total += page.size
        end_of_header = page_match.end()
        position = page.stored + (_end_of_statistics(data, end_of_header) if page.has_statistics else end_of_header)
    if total <= limit and (position != end or values != num_values):
        raise PackError(
            f"column {column.path}: its pages hold {values} values and end at {position}, not {num_values} and {end}"
        )
    return total


class _Page(NamedTuple):
    size: int  # uncompressed
    stored: int
    num_values: int
    is_dictionary: bool = False
    uses_dictionary: bool = False
    has_statistics: bool = False


@functools.lru_cache(1024)  # a page's 300 bytes stay
def _page(header: bytes) -> _Page:
    """Read a header that `_PAGE` matches; many pages have the same. Raises PackError for what packs do not use."""
    page = _PAGE.match(header)
    assert page is not None
    if page[6] is not None:
        size, stored, count = map(_unsigned, page.group(6, 7, 8))
        return _Page(size, stored, count, is_dictionary=True)
    encoding = page[4][0]
    if encoding not in (_PLAIN, _BYTE_STREAM_SPLIT, *_DICTIONARY):
        raise PackError(f"a page has encoding {encoding >> 1}, which packs do not use")
    size, stored, count = map(_unsigned, page.group(1, 2, 3))
    return _Page(size, stored, count, uses_dictionary=encoding in _DICTIONARY, has_statistics=page[5] is not None)


def _unsigned(varint: bytes) -> int:
    number = unsigned(varint)
    if number & 1:
        raise PackError("a page header holds a negative size")
    return number >> 1


def _end_of_statistics(data: bytes, position: int) -> int:
    """Return where a page header ends whose statistics begin at ``position``; the first packs had them."""
    while position < len(data) and (kind := data[position] & 0x0F):
        position += 1
        if kind in (5, 6, 8):  # an integer, or the length of a text
            varint = _ONE_VARINT.match(data, position)
            if varint is None:
                break
            position = varint.end() + (unsigned(varint[0]) if kind == 8 else 0)
        elif kind not in (1, 2):
            break
    if data[position : position + 3] != b"\x00\x00\x00":
        raise PackError(f"the statistics of a page are not readable, at byte {position}")
    return position + 3
