"""Data files from strangers: each is refused with file and line, and none takes all memory or never ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.deadline import ends_within
from tests.trainer.data.row_sets import prompt_set, turn_set

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data import row_files
from penstock.trainer.data.row_files import open_rows
from penstock.trainer.errors import MalformedData

Write = Callable[[Path], object]


def row(text: str) -> Write:
    return lambda path: path.write_text('{"prompt": "sort 1", "ground_truth": "1", ' + text + "}")


def data(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def parquet(**columns: Any) -> Write:
    return lambda path: pq.write_table(
        pa.table({"prompt": ["a"], "ground_truth": ["1"], **columns}), path, compression="zstd", write_statistics=False
    )


def _twice(path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"], ["1"]], names=["prompt", "prompt", "ground_truth"]), path)


def arrow(table: pa.Table, compression: str | None) -> Write:
    def write(path: Path) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table)

    return write


def lying(write: Write) -> Write:
    """Write a Parquet file, then have its footer say that a row group has 8 bytes."""

    def patched(path: Path) -> None:
        write(path)
        rest, size = 2 * pq.read_metadata(path).row_group(0).total_byte_size, b""
        while rest:
            rest, size = rest >> 7, size + bytes([rest & 127 | (128 if rest >> 7 else 0)])
        said = bytes([0x90]) + b"\x80" * (len(size) - 2) + b"\0"
        path.write_bytes(path.read_bytes().replace(size, said))
        assert pq.read_metadata(path).row_group(0).total_byte_size == 8

    return patched


def repeated(num: int, size: int) -> pa.Array:
    """Return one list of ``num`` times the same text."""
    return pa.ListArray.from_arrays(
        [0, num], pa.DictionaryArray.from_arrays(pa.array([0] * num, pa.int32()), ["a" * size])
    )


LONG = pa.table({"prompt": ["a" * 10_000_000]})
VIEWS = pa.ListViewArray.from_arrays([0] * 1000, [1000] * 1000, pa.array(["a" * 100] * 1000))
TWICE = pa.ListViewArray.from_arrays([0], [1000], VIEWS)
_NO_TEXT = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])


def after_none(path: Path) -> None:
    """Write a Parquet file whose first row group has no rows."""
    table = pa.table({"prompt": [b"\xff"], "ground_truth": ["1"]})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)


def of_lists(path: Path) -> None:
    """Write a Parquet file whose first page has a header of lists in lists."""
    pq.write_table(LONG, path, use_dictionary=False, compression="none")
    path.write_bytes(b"PAR1" + b"\x19" * 4000 + path.read_bytes()[4004:])


DEEP = b"[" * 100_000 + b"]" * 100_000


HOSTILE: dict[str, tuple[str, Write, str]] = {
    "surrogate in a prompt": ("d.jsonl", row('"prompt": "\\ud800"'), r":1: .*lone surrogate"),
    "in a truth": ("d.jsonl", row('"ground_truth": "\\ud800"'), r":1: column ground_truth: a lone"),
    "in a source": ("d.jsonl", row('"data_source": "\\ud800"'), r":1: column data_source: a lone"),
    "in extra_info": ("d.jsonl", row('"extra_info": {"a": "\\udfff"}'), r":1: column extra_info: a lone"),
    "infinite": ("d.jsonl", row('"extra_info": {"a": 1e999}'), r":1: column extra_info"),
    "NaN": ("d.jsonl", row('"extra_info": NaN'), ":1: not JSON"),
    "5,000 digits": ("d.jsonl", row('"extra_info": ' + "9" * 5000), ":1: not JSON"),
    "no UTF-8": ("d.jsonl", data(b'{"prompt": "\xff"}'), ":1: not UTF-8 text"),
    "nested JSON line": ("d.jsonl", data(b'{"prompt": ' + DEEP + b"}"), ":1: not JSON"),
    "NUL": ("d.jsonl", data(b"\0" * 1000), ":1: not JSON"),
    "no object": ("d.jsonl", data(b"[1]"), ":1: expected an object"),
    "long line": ("d.jsonl", data(b'{"prompt": "' + b"a" * 5000 + b'"}'), ":1: a line of more than 4096 bytes"),
    "nested array": ("d.json", data(DEEP), ":1: not JSON"),
    "5,000 digits in an array": ("d.json", data(b'[{"a": ' + b"9" * 5000 + b"}]"), ":1: not JSON"),
    "array without UTF-8": ("d.json", data(b'[{"prompt": "\xff"}]'), "not UTF-8 text"),
    "nested CSV cell": ("d.csv", data(b'prompt,extra_info,ground_truth\na,"' + DEEP + b'",1\n'), ":2: "),
    "array of small objects": ("d.json", data(b"[" + b"{}," * 2**21 + b"{}]"), "may take"),
    "a column twice": ("d.csv", data(b"prompt,prompt\na,b\n"), "column prompt is there twice"),
    "CSV columns": ("d.csv", data(b"a," * 2000 + b"\n1\n"), "2001 columns, the limit is 1000"),
    "CSV of a part of a mark": ("d.csv", data(b"\xef"), "no rows"),
    "blank lines": ("d.jsonl", data(b"{}" + b"\n" * 1_000_003), "more than 1000000 blank lines"),
    "open quote": ("d.csv", data(b'prompt\n"' + b"a" * 100), ":2: not CSV"),
    "CSV without UTF-8": ("d.csv", data(b"\xff\n1\n"), "not UTF-8 text"),
    "no footer": ("d.parquet", data(b"PAR1" + b"x" * 100 + b"PAR1"), "not a readable Parquet"),
    "footer of 2 GB": ("d.parquet", data(b"PAR1\xff\xff\xff\x7fPAR1"), "not a readable Parquet"),
    "bytes": ("d.parquet", parquet(prompt=[b"\xff\xfe"]), "row 1: column prompt: expected a text"),
    "after an empty row group": ("d.parquet", after_none, "row 1: column prompt: expected a text"),
    "text that is none": ("d.parquet", parquet(prompt=_NO_TEXT), "row 1: a value that cannot be read"),
    "nanoseconds": ("d.parquet", parquet(extra_info=pa.array([1], pa.timestamp("ns"))), "row 1: a value"),
    "lists of lists": ("d.parquet", of_lists, "not a readable Parquet file .*list of lists"),
    "a Parquet column twice": ("d.parquet", _twice, "column prompt is there twice"),
    "columns": ("d.parquet", parquet(**{f"c{n}": [1] for n in range(1000)}), "1002 columns"),
    "a bomb": ("d.parquet", parquet(extra_info=["a" * 10_000_000]), "times its size; the limits are"),
    "a footer that lies": ("d.parquet", lying(parquet(extra_info=["a" * 10_000_000])), "times its size"),
    "a bomb of runs": ("d.parquet",
     parquet(label=pa.nulls(1, pa.bool_()), extra_info=pa.array([[7] * 10**7], pa.list_(pa.int8()))),
                     "times its size"),
    "one text often": ("d.parquet", parquet(extra_info=repeated(1000, 200_000)), "row 1: 2000.* the limit of a row is"),
    "texts as part of the one before": ("d.parquet",
     lambda p: pq.write_table(LONG, p, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"),
                     "DELTA_BYTE_ARRAY"),
    "an Arrow bomb": ("d.arrow", arrow(LONG, "zstd"), "times its size"),
    "a dictionary": ("d.feather",
     arrow(pa.table({"prompt": LONG["prompt"].combine_chunks().dictionary_encode()}), "zstd"), "times its size"),
    "Arrow: one text often": ("d.arrow", arrow(pa.table({"prompt": ["a"], "x": repeated(1000, 200_000)}), None),
     "the limit of a row is"),
    "views of views": ("d.arrow", arrow(pa.table({"prompt": ["a"], "x": TWICE}), None), "whose values may overlap"),
    "rows": ("d.parquet", lambda p: pq.write_table(pa.table({"prompt": ["a"] * 200}), p), "200 rows, the limit is 100"),
    "a CSV without line ends": ("d.csv", data(b"prompt\n" + b"a" * 9000), "a line of 4096 characters or more"),
    "a pipe that nothing writes": ("d", os.mkfifo, "not a regular file"),
    "a device without end": ("d", lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a link to itself": ("d", lambda path: path.symlink_to(path), "not readable"),
    "a folder": ("d", lambda path: path.mkdir(), "not a regular file"),
    "compressed": ("d", data(b"\x1f\x8b\x08" + b"x" * 100), "decompress it first"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_data_file_is_refused(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, write, expected = HOSTILE[case]
    if "long line" in expected or "a line of" in expected:
        monkeypatch.setattr(row_files, "MAX_ROW_BYTES", 4096)
    monkeypatch.setattr(row_files, "_SMALL_BYTES", 1024**2)
    monkeypatch.setattr(row_files, "_MAX_PARQUET_ROWS", 100)
    write(tmp_path / name)
    with pytest.raises(MalformedData, match=expected), ends_within(30):
        prompt_set(tmp_path / name, tokenizer)


@pytest.mark.parametrize("is_arrow", [False, True])
def test_one_text_in_many_rows_is_refused(tmp_path: Path, is_arrow: bool) -> None:
    """A file of a few hundred bytes may stand for hours: each of its rows would be decoded by itself."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 1_000_000]))
    table = pa.table({"prompt": texts})
    arrow(table, "zstd")(tmp_path / "d") if is_arrow else pq.write_table(table, tmp_path / "d", compression="zstd")
    with pytest.raises(MalformedData, match=r"3000012000 bytes uncompressed, .* times its size"):
        row_files.open_rows(tmp_path / "d")


def test_a_repeated_text_is_held_once(tmp_path: Path) -> None:
    """A dictionary of one text and 300,000 references to it are a small file, and stay small."""
    count = 300_000
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 1000]))
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "d.parquet", store_schema=False)
    before = pa.total_allocated_bytes()
    rows = open_rows(tmp_path / "d.parquet")
    assert pa.total_allocated_bytes() - before < 10 * count  # as texts: 1,000 bytes each
    assert len(rows) == count
    assert rows.row(count - 1) == {"prompt": "x" * 1000}


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "sort 1", "completion": "\\ud800"}',
        '{"messages": [{"role": "assistant", "content": 7}]}',
        '{"messages": {"a": 1}}',
        '{"messages": [1, 2]}',
        '{"prompt": {"a": 1}, "completion": []}',
        '{"messages": [{"role": ["x"], "content": "a"}, {"role": "assistant", "content": {"x": 1}}]}',
    ],
)
def test_hostile_turns_are_refused(tmp_path: Path, tokenizer: ChatTokenizer, text: str) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(MalformedData, match=r"d\.jsonl:1: "):
        turn_set(tmp_path / "d.jsonl", tokenizer)
