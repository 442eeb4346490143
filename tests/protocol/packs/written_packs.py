"""Packs as any program can write them: other tables, and other values in a column than our writer gives it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.groups import SINGLE_TURN, Sampling, Task
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group


def table_of(*groups: Group) -> pa.Table:
    return pq.read_table(io.BytesIO(group_pack.encode(groups)))


def task_of(group: Group, **changes: Any) -> Task:
    """Return the task that asked for a group, or one that differs from it."""
    fields: dict[str, Any] = {
        "group_id": group.group_id,
        "prompt_ids": tuple(group.trajectories[0].token_ids[: group.num_prompt_tokens].tolist()),
        "prompt_text": group.prompt_text,
        "group_size": len(group.episodes or group.trajectories),
        "sampling": Sampling(max_new_tokens=64),
        "reward": group.reward,
        "split": group.split,
        "attempt": group.attempt,
        "issued_version": group.issued_version,
        "environment": "lookup" if group.episodes else SINGLE_TURN,
    }
    return Task(**fields | changes)


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
