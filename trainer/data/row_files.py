"""Rows of JSONL, JSON, CSV, Parquet and Arrow files, read one at a time by number, each with its file and line.

JSONL rows stay on disk: only their byte offsets are in memory. CSV files and JSON arrays are held parsed,
Parquet files as an Arrow table, which is about the size of the uncompressed columns. Arrow files are mapped, not read.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import mmap
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.errors import PackError
from penstock.protocol.files import MOST_JSON_BYTES, JsonTooLarge, json_value
from penstock.trainer.data.table_bounds import arrow_bytes, parquet_bytes, refused_type, row_bytes, text_columns
from penstock.trainer.errors import MalformedData

Row = dict[str, Any]

MAX_ROW_BYTES = 64 * 1024**2  # of a JSON line
_MAX_COLUMNS = 1000
_MAX_BLANK_LINES = 1_000_000  # of JSON Lines
_MAX_TABLE_BYTES = 64 * 1024**3  # decoded: the table is held in memory
_MAX_RATIO = 1000  # decoded to stored, above `_SMALL_BYTES`
_SMALL_BYTES = 256 * 1024**2
_SMALL_ROW_BYTES = 2 * 1024**3  # decoded, a text wherever it is used: 2.4 s of CPU for each 10**9
_MAX_PARQUET_ROWS = 2**26
_MAX_ARRAY_RATIO = 32  # of a JSON array in memory to its file, above `MOST_JSON_BYTES`


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value of a table that Python cannot hold, and why."""

    reason: str


class RowFile(ABC):
    """The rows of one data file; ``nested_texts``: nested values are JSON texts, as in CSV; ``is_table``: of typed columns."""

    nested_texts = False
    is_table = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = array("q")  # where each row begins
        self.repeated_keys: set[str] = set()
        """Keys that an object of a row read so far has twice; the last one counts."""

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, number: int) -> str:
        return f"{self.path}:{self._lines[number]}"

    @abstractmethod
    def row(self, number: int) -> Row: ...


def open_rows(path: Path) -> RowFile:
    """Open a data file in the format of its suffix, or else of its first bytes; raises MalformedData for any other."""
    try:
        if path.exists() and not path.is_file():  # a pipe has no end, and neither has a device
            raise MalformedData(f"{path}: not a regular file; give a file")
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as err:
        raise MalformedData(f"{path}: not readable ({err.strerror}); check the path") from None
    suffix = path.suffix.lower()
    stripped = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not stripped:
        raise MalformedData(f"{path}: the file is empty; give a file with rows")
    if start.startswith(b"PAR1"):
        rows: RowFile = _ParquetRows(path)
    elif start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        rows = _ArrowRows(path)
    elif suffix in {".csv", ".tsv"}:
        rows = _CsvRows(path, delimiter="\t" if suffix == ".tsv" else ",")
    elif stripped.startswith(b"[") and suffix != ".jsonl":
        rows = _JsonArrayRows(path)
    elif stripped.startswith(b"{") or suffix in {".jsonl", ".ndjson"}:
        rows = _JsonLineRows(path)
    else:
        raise MalformedData(
            f"{path}: expected JSON lines, a JSON array, CSV or Parquet; it begins with {start[:12]!r}"
            + ("; decompress it first" if start.startswith((b"\x1f\x8b", b"PK", b"\x28\xb5\x2f\xfd")) else "")
        )
    if not len(rows):
        raise MalformedData(f"{path}: no rows; give a file with rows")
    return rows


def fingerprint(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


class _JsonLineRows(RowFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._offsets = array("q")
        with path.open("rb") as file:
            offset = len(b"\xef\xbb\xbf") if file.read(3) == b"\xef\xbb\xbf" else 0
            file.seek(offset)
            for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), 1):
                if len(line) > MAX_ROW_BYTES:
                    raise MalformedData(f"{path}:{number}: a line of more than {MAX_ROW_BYTES} bytes; split or drop it")
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                elif number - len(self._lines) > _MAX_BLANK_LINES:
                    raise MalformedData(f"{path}:{number}: more than {_MAX_BLANK_LINES} blank lines; remove them")
                offset += len(line)
        self._file = path.open("rb")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def row(self, number: int) -> Row:
        self._file.seek(self._offsets[number])
        return _json_row(self._file.readline(), self.repeated_keys)


class _JsonArrayRows(RowFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        most = max(MOST_JSON_BYTES, _MAX_ARRAY_RATIO * path.stat().st_size)
        try:
            self._rows = json_value(path.read_bytes(), most, object_pairs_hook=partial(_object, self.repeated_keys))
        except UnicodeDecodeError as err:
            raise MalformedData(f"{path}: not UTF-8 text (at byte {err.start})") from None
        except JsonTooLarge as err:
            raise MalformedData(f"{path}: {err}; give the rows as JSON Lines, one a line") from None
        except ValueError as err:
            line = err.lineno if isinstance(err, json.JSONDecodeError) else 1
            raise MalformedData(f"{path}:{line}: not JSON ({_reason(err)})") from None

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, number: int) -> str:
        return f"{self.path}: row {number + 1}"

    def row(self, number: int) -> Row:
        return _an_object(self._rows[number])


class _CsvRows(RowFile):
    nested_texts = True

    def __init__(self, path: Path, *, delimiter: str) -> None:
        super().__init__(path)
        self._rows: list[list[str]] = []
        csv.field_size_limit(1 << 30)  # prompts may be longer than the module's 128 KiB
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(_csv_lines(file), delimiter=delimiter, strict=True)
            try:
                self._columns = next(reader, [])
                _check_columns(path, self._columns)
                line = reader.line_num + 1
                for row in reader:
                    if row:
                        self._rows.append(row)
                        self._lines.append(line)
                    line = reader.line_num + 1
            except csv.Error as err:
                raise MalformedData(f"{path}:{reader.line_num}: not CSV ({err})") from None
            except UnicodeDecodeError as err:
                raise MalformedData(f"{path}: not UTF-8 text (at byte {err.start})") from None

    def row(self, number: int) -> Row:
        cells = self._rows[number]
        if len(cells) != len(self._columns):
            raise MalformedData(
                f"expected {len(self._columns)} cells as in the header ({', '.join(self._columns)}), got {len(cells)}"
            )
        return {name: cell for name, cell in zip(self._columns, cells, strict=True) if cell != ""}


def _csv_lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_ROW_BYTES):
        if len(line) == MAX_ROW_BYTES:
            raise csv.Error(f"a line of {MAX_ROW_BYTES} characters or more")
        yield line


class _TableRows(RowFile):
    is_table = True
    _table: pa.Table

    @functools.cached_property
    def _has_nested(self) -> bool:
        return any(pa.types.is_nested(kind) for kind in self._table.schema.types)

    def __len__(self) -> int:
        return self._table.num_rows

    def place(self, number: int) -> str:
        return f"{self.path}: row {number + 1}"

    def row(self, number: int) -> Row:
        try:
            part = self._table.slice(number, 1)
            size = sum(map(row_bytes, part.columns)) if self._has_nested else 0
            if size > MAX_ROW_BYTES:
                raise MalformedData(f"{size} bytes, the limit of a row is {MAX_ROW_BYTES}; split or drop it")
            [row] = part.to_pylist(maps_as_pydicts="lossy")
        except (pa.ArrowException, ValueError, OverflowError):
            row = {name: _cell(self._table.column(name), number) for name in self._table.column_names}
        return {name: value for name, value in row.items() if value is not None}


def _cell(column: pa.ChunkedArray, number: int) -> Any:
    try:
        return column[number].as_py(maps_as_pydicts="lossy")
    except (pa.ArrowException, ValueError, OverflowError) as err:
        return Unreadable(" ".join(str(err).split())[:200])


class _ParquetRows(_TableRows):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with pq.ParquetFile(path) as file, path.open("rb") as raw:
                _check_columns(path, file.schema_arrow.names)
                _check_types(path, file.schema_arrow)
                with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    _check_size(path, parquet_bytes(data, file.schema, _MAX_TABLE_BYTES))
                if file.metadata.num_rows > _MAX_PARQUET_ROWS:
                    raise MalformedData(
                        f"{path}: {file.metadata.num_rows} rows, the limit is {_MAX_PARQUET_ROWS}: split the file"
                    )
                texts = text_columns(file.schema)
            # A repeated text stays one text: a few bytes of a file may stand for gigabytes of them.
            self._table = pq.read_table(path, read_dictionary=texts, pre_buffer=False)
            _check_size(path, sum(map(row_bytes, self._table.columns)), of_rows=True)
        except (pa.ArrowException, OSError, ValueError, IndexError, PackError) as err:
            raise MalformedData(f"{path}: not a readable Parquet file ({(str(err).splitlines() or [''])[0]})") from None


class _ArrowRows(_TableRows):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            source = pa.memory_map(str(path))
            start = 8 if source.read(6) == b"ARROW1" else 0  # a file is a stream, and a footer that could say otherwise
            source.seek(start)
            _check_size(path, arrow_bytes(pa.ipc.MessageReader.open_stream(source), _MAX_TABLE_BYTES))
            source.seek(start)
            with pa.ipc.open_stream(source) as reader:
                _check_columns(path, reader.schema.names)
                _check_types(path, reader.schema)
                self._table = reader.read_all()
                self._table.validate(full=True)
                _check_size(path, sum(map(row_bytes, self._table.columns)), of_rows=True)
        except (pa.ArrowException, OSError, ValueError) as err:
            raise MalformedData(f"{path}: not a readable Arrow file ({(str(err).splitlines() or [''])[0]})") from None


def _check_columns(path: Path, names: list[str]) -> None:
    twice = [name for name in set(names) if names.count(name) > 1] if len(names) <= _MAX_COLUMNS else []
    if twice or len(names) > _MAX_COLUMNS:
        what = f"column {twice[0]} is there twice" if twice else f"{len(names)} columns, the limit is {_MAX_COLUMNS}"
        raise MalformedData(f"{path}: {what}; rename or drop some")


def _check_types(path: Path, schema: pa.Schema) -> None:
    if (kind := refused_type(schema.types)) is not None:
        raise MalformedData(f"{path}: a column of type {kind}, whose values may overlap; convert it to lists and texts")


def _check_size(path: Path, size: int, *, of_rows: bool = False) -> None:
    """Refuse a file whose table would not fit into memory, or whose rows would take hours, as one text in all of them."""
    small, most = (_SMALL_ROW_BYTES, math.inf) if of_rows else (_SMALL_BYTES, _MAX_TABLE_BYTES)
    ratio = size / path.stat().st_size
    if size > most or (size > small and ratio > _MAX_RATIO):
        raise MalformedData(
            f"{path}: {size} bytes uncompressed, {ratio:.0f} times its size; the limits are {_MAX_TABLE_BYTES} and "
            f"{_MAX_RATIO} times: split the file"
        )


def _json_row(line: bytes, repeated: set[str]) -> Row:
    try:
        return _an_object(json_value(line, object_pairs_hook=partial(_object, repeated)))
    except UnicodeDecodeError as err:
        raise MalformedData(f"not UTF-8 text (at byte {err.start} of the line)") from None
    except ValueError as err:
        raise MalformedData(f"not JSON ({_reason(err)})") from None


def _an_object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise MalformedData(f"expected an object with columns, got {type(value).__name__}")
    return {name: item for name, item in value.items() if item is not None}


def _object(repeated: set[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated.update(key for key in made if keys.count(key) > 1)
    return made


def _reason(err: Exception) -> str:
    return f"{err.msg} at column {err.colno}" if isinstance(err, json.JSONDecodeError) else str(err)
