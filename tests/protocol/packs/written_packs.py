"""Packs as any program can write them: other tables, and other values in a column than our writer gives it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group


def table_of(*groups: Group) -> pa.Table:
    return pq.read_table(io.BytesIO(group_pack.encode(groups)))


def written(table: pa.Table, **options: Any) -> bytes:
    """Return any table as a pack with the right tag, in one row group."""
    sink = io.BytesIO()
    options = {
        "compression": "lz4",
        "use_dictionary": False,
        "write_statistics": False,
        "store_schema": False,
    } | options
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=max(1, len(table)))
        writer.add_key_value_metadata({"schema": group_pack.SCHEMA_TAG})
    return sink.getvalue()


def altered(group: Group, column: str = "", change: Callable[[list[Any]], list[Any]] = lambda values: values) -> bytes:
    """Return the pack of a group with other values in a column."""
    columns = table_of(group).to_pydict()
    if column:
        columns[column] = change(columns[column])
    schema = next(schema for schema in group_pack.SCHEMAS.values() if schema.names == [*columns])
    return written(pa.table(columns, schema=schema))
