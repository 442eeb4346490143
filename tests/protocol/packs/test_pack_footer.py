"""Footers of packs are read as pyarrow reads them, and what ends the process in pyarrow is refused before."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.groups import make_group, make_groups

from penstock.protocol.errors import PackError
from penstock.protocol.packs import group_pack, pack_bounds, pack_footer
from penstock.protocol.packs.group_pack import encode
from penstock.protocol.packs.pack_footer import Chunk, RowGroup, StoredColumn


def columns_of(data: bytes) -> tuple[StoredColumn, ...]:
    file = pq.ParquetFile(pa.BufferReader(data))
    return pack_bounds.check_schema(file, group_pack._accepted(), (file.metadata.metadata or {}).keys())


def read(data: bytes) -> list[RowGroup]:
    return pack_footer.row_groups(data, pack_bounds.check_footer(data), columns_of(data))


def by_pyarrow(data: bytes) -> list[RowGroup]:
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        found.append(
            RowGroup(
                group.num_rows,
                [
                    Chunk(c.num_values, c.total_compressed_size, c.data_page_offset, c.dictionary_page_offset)
                    for c in chunks
                ],
            )
        )
    return found


def rewritten(data: bytes, old: bytes, new: bytes) -> bytes:
    """A file with other bytes at the first place in its footer that has ``old``, and the size of that footer."""
    size = int.from_bytes(data[-8:-4], "little")
    head, footer = data[: -8 - size], data[-8 - size : -8]
    changed = re.sub(old, lambda _: new, footer, count=1, flags=re.DOTALL)
    assert changed != footer
    return head + changed + len(changed).to_bytes(4, "little") + b"PAR1"


def in_other_forms(data: bytes, **options: object) -> bytes:
    """The same table in one row group, by a writer with other options."""
    sink = pa.BufferOutputStream()
    table = pq.read_table(pa.BufferReader(data))
    pq.write_table(table, sink, store_schema=False, **options)  # pyright: ignore[reportArgumentType]
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("num_groups", [1, 3, 40])
def test_a_footer_is_read_as_pyarrow_reads_it(num_groups: int) -> None:
    """Number and place of the values of each column in each row group, also in a list that is longer than 14."""
    data = encode(make_groups(num_groups, size=2))
    assert read(data) == by_pyarrow(data)


@pytest.mark.parametrize("options", [{"write_statistics": True}, {"use_dictionary": True}, {"compression": "none"}])
def test_forms_of_other_writers_are_read_field_by_field(options: dict[str, object]) -> None:
    data = in_other_forms(encode(make_groups(2)), **options)
    assert read(data) == by_pyarrow(data)


def test_chunks_of_our_writer_have_the_form_that_is_read_at_once() -> None:
    """Every chunk of a pack: without the short way, reading a pack costs twice as much."""
    data = encode(make_groups(2))
    size = int.from_bytes(data[-8:-4], "little")
    for column in columns_of(data):
        assert len(pack_footer._written_form(column).findall(data, len(data) - 8 - size)) == 2, column.path


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (rb"\x19\x06\x19\x06\x00\x00\x00", b"\x19\x26\x00\x00\x19\x06\x00\x00\x00", "size statistics that are not of"),
        (rb"\x19\x06\x19\x06\x00\x00\x00", b"\x19\x06\x19\x36\x00\x00\x00\x00\x00\x00", "size statistics that are not"),
        (rb"\x15\x02\x00\x00\x00", b"\x15\x02\x00\x3c\x16\x02\x00\x00\x00", "size statistics that are not of its type"),
        (rb"\x19\x06\x19\x06\x00\x00\x00", b"\x19\x06\x19\x06\x00\x00\x5c\x1c\x00\x00\x00", "is encrypted"),
        (rb"\x19\x06\x19\x06\x00\x00\x00", b"\x19\x06\x19\x06\x00\x00\x68\x01x\x00", "is encrypted"),
    ],
    ids=["repetition levels", "definition levels", "bytes of numbers", "encrypted", "encrypted metadata"],
)
def test_chunks_that_end_the_process_in_pyarrow_are_refused(old: bytes, new: bytes, problem: str) -> None:
    """Histograms of another length than the levels, sizes of texts that are none, encryption: an error, and no abort."""
    with pytest.raises(PackError, match=problem):
        group_pack._read(rewritten(encode([make_group()]), old, new), None, None, None)


@pytest.mark.parametrize(
    ("footer", "problem"),
    [
        (b"\x1c" * 40, "nested deeper than 16"),
        (b"\x16" + b"\xff" * 11, "more than 64 bits"),
        (b"\x18\x7fabc", "127 bytes at byte 2, beyond its end"),
        (b"\x1b\x00", "field of type 11"),
        (b"\x19\xf3\xff\xff\xff\x7f" + b"\x00" * (2**20 + 1), f"more than {2**20} values"),
        (b"\x16", "ends within a field"),
        (b"\x49\x1c\x00\x00", r"no field of number and type \(1, 9\)"),
        (b"\x49\x1c\x19\x0c\x00\x00", "0 columns, its schema has 1"),
        (b"\x49\x15\x02\x00", "a list holds values of another type"),
    ],
)
def test_a_hostile_footer_is_refused(footer: bytes, problem: str) -> None:
    """Depth, integers, lengths, types and numbers of values have limits, and what is missing is named."""
    column = StoredColumn("x", 4, is_text=False, max_repetition_level=0, max_definition_level=0)
    with pytest.raises(PackError, match=problem):
        pack_footer.row_groups(footer, 0, [column])
