"""Mutations of packs: of the Arrow schema, of the values, of the size, of the bytes; pure, the same for the same generator.

| function    | gives                                                                                             |
|-------------|---------------------------------------------------------------------------------------------------|
| `schema_of` | columns of another type (struct, list of another kind, dictionary, null), missing, repeated, added |
| `values_of` | the right schema with values that no engine reports: ids, masks, log-probabilities, runs, rows     |
| `bombs`     | a few kB that decode to tens of MB                                                                 |
| `bytes_of`  | flipped, cut and spliced bytes, the footer preferred                                               |

Values that only the model can tell from real ones (token ids of the vocabulary, finite log-probabilities below 0) are
`plausible_of`: a stolen login of a worker can always invent those.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.rigs.fuzz import values

from penstock.protocol.packs.group_pack import SCHEMA, SCHEMA_TAG

Row = dict[str, Any]
Groups = list[list[Row]]
_BOMB_TOKENS = 4_000_000


def read(data: bytes) -> Groups:
    file = pq.ParquetFile(pa.BufferReader(data))
    return [file.read_row_group(number).to_pylist() for number in range(file.num_row_groups)]


def write(tables: list[pa.Table], **options: Any) -> bytes:
    """Return tables as a Parquet object with one row group each and the tag of a pack."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, tables[0].schema, write_statistics=False, store_schema=False, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata({"schema": SCHEMA_TAG})
    return sink.getvalue()


def write_rows(groups: Groups, **options: Any) -> bytes:
    return write([pa.Table.from_pylist(rows, schema=SCHEMA) for rows in groups], **options)


# ── schema ────────────────────────────────────────────────────────────────────────────────────────────────


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 7


def _large(column: list[Any]) -> pa.DataType:
    first = column[0] if column and isinstance(column[0], list) else column
    return pa.large_list(pa.array(first).type)


def _same(value: Any, kind: pa.DataType) -> Callable[[list[Any]], pa.Array]:
    return lambda column: pa.array([value] * len(column), kind)


_COLUMNS: dict[str, Callable[[list[Any]], pa.Array]] = {
    "struct": lambda column: pa.array([{"a": value} for value in column]),
    "structs": lambda column: pa.array([[{"a": 1}] if isinstance(value, list) else {"b": "x"} for value in column]),
    "int64": lambda column: pa.array([list(map(_int, v)) if isinstance(v, list) else _int(v) for v in column]),
    "double": lambda column: pa.array([[float(_int(x)) for x in v] if isinstance(v, list) else 0.5 for v in column]),
    "text": lambda column: pa.array([[str(x) for x in v] if isinstance(v, list) else str(v) for v in column]),
    "binary": lambda column: pa.array([str(value).encode() for value in column], pa.binary()),
    "large-list": lambda column: pa.array([v if isinstance(v, list) else [v] for v in column], _large(column)),
    "nested-list": lambda column: pa.array([[value] for value in column]),
    "null-items": lambda column: pa.array([[None, *v[1:]] if isinstance(v, list) and v else None for v in column]),
    "dictionary": lambda column: pa.array([str(value) for value in column]).dictionary_encode(),
    "nulls": _same(None, pa.string()),
    "null-type": _same(None, pa.int32()),
    "map": _same([("k", 1)], pa.map_(pa.string(), pa.int32())),
    "boolean": _same(True, pa.bool_()),
    "timestamp": _same(1, pa.timestamp("ns")),
    "fixed-list": _same([1, 2], pa.list_(pa.int32(), 2)),
    "float16": _same(np.float16(1.0), pa.float16()),
    "decimal": _same(1, pa.decimal128(30, 2)),
    "uint64": _same(2**64 - 1, pa.uint64()),
}


def schema_of(rng: random.Random, data: bytes, _: bytes) -> tuple[str, bytes]:
    tables = [pa.Table.from_pylist(rows, schema=SCHEMA) for rows in read(data)]
    of_tokens = ("token_ids", "loss_mask", "behaviour_logprobs", "version_runs")
    column = rng.choice(SCHEMA.names if rng.random() < 0.4 else of_tokens)
    order, added = rng.sample(SCHEMA.names, len(SCHEMA.names)), rng.choice(("rewards", "x" * 300, ""))
    changes: dict[str, Callable[[pa.Table], pa.Table]] = {
        "drop": lambda table: table.drop_columns(column),
        "repeat": lambda table: table.append_column(column, table[column]),
        "add": lambda table: table.append_column(added, pa.array([1] * table.num_rows)),
        "rename": lambda table: table.rename_columns({column: f"{column}_"}),
        "order": lambda table: table.select(order),
        "no-rows": lambda table: table.slice(0, 0),
        "nullable": lambda table: pa.Table.from_arrays(table.columns, names=table.column_names),
    }
    name = rng.choice([*_COLUMNS, *_COLUMNS, *changes, "tag"])
    if name == "tag":
        return name, write(tables).replace(SCHEMA_TAG.encode(), rng.choice((b"group_pack.v2", b"\xff" * 13)))
    if name in changes:
        return name, write([changes[name](table) for table in tables])
    at = SCHEMA.names.index(column)
    tables = [table.set_column(at, column, _COLUMNS[name](table[column].to_pylist())) for table in tables]
    return f"{name} {column}", write(tables)


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────


def _token(rng: random.Random, row: Row) -> None:
    place = rng.randrange(len(row["token_ids"]))
    row["token_ids"][place] = rng.choice((-1, -(2**31), 2**31 - 1, 100_000, 1000, 152_000))


def _logprob(rng: random.Random, row: Row) -> None:
    place = rng.randrange(len(row["behaviour_logprobs"]))
    row["behaviour_logprobs"][place] = rng.choice(
        (float("nan"), float("inf"), float("-inf"), 3.0, 2e-3, -1e30, -3e38, 88.0, -104.5, -999.0)
    )


def _mask(rng: random.Random, row: Row) -> None:
    size = len(row["loss_mask"])
    row["loss_mask"] = rng.choice(
        ([True] * size, [False] * size, row["loss_mask"][::-1], [not m for m in row["loss_mask"]])
    )


def _mask_and_runs(_rng: random.Random, row: Row) -> None:
    """The prompt is trained on too: mask and runs agree with one another and not with the task."""
    row["loss_mask"] = [True] * len(row["loss_mask"])
    row["version_runs"] = [row["version_runs"][0], 0, len(row["loss_mask"])]


def _runs(rng: random.Random, row: Row) -> None:
    version, start, end = row["version_runs"][:3]
    size = len(row["token_ids"])
    row["version_runs"] = rng.choice(
        (
            [], [version], [version, start], [version, end, start], [version, start, end, version, start, end],
            [version, 0, end - start], [-1, start, end], [2**40, start, end], [2**63 - 1, start, end], [version, -5, size],
            [version, start, end + 1], [version + 1, start, end], [version, start, start + 1, version, start, end - 1],
            [version, start, (start + end) // 2, max(0, version - 1), (start + end) // 2, end],
        )
    )  # fmt: skip


def _lengths(rng: random.Random, row: Row) -> None:
    name = rng.choice(("token_ids", "loss_mask", "behaviour_logprobs"))
    row[name] = rng.choice((row[name][:-1], [], row[name] * 2, row[name] * 400))


def _empty_completion(_rng: random.Random, row: Row) -> None:
    prompt = row["num_prompt_tokens"]
    for name in ("token_ids", "loss_mask", "behaviour_logprobs"):
        row[name] = row[name][:prompt]
    row["version_runs"] = []


def _prompt_length(rng: random.Random, row: Row) -> None:
    row["num_prompt_tokens"] = rng.choice((-1, 0, 1, 2**31 - 1, row["num_prompt_tokens"] + 1))


def _texts(rng: random.Random, row: Row) -> None:
    name = rng.choice(
        (
            "finish_reason",
            "split",
            "reward_name",
            "ground_truth",
            "extra_info",
            "completion_text",
            "prompt_text",
            "data_source",
        )
    )
    row[name] = rng.choice(
        (values.text(rng).encode("utf-8", "replace").decode(), "", "[" * 3000, '{"a":' * 900, "NaN", "1" * 5000)
    )


def _numbers(rng: random.Random, row: Row) -> None:
    row["attempt"] = rng.choice((-1, 7, 2**31 - 1))
    row["issued_version"] = rng.choice((-1, 2**62, row["issued_version"] + 1))


def _long(_rng: random.Random, row: Row) -> None:
    """A completion far beyond the task's limit, consistent in itself."""
    _, start, end = row["version_runs"][:3]
    extra = 3000
    for name in ("token_ids", "loss_mask", "behaviour_logprobs"):
        row[name] = row[name] + [row[name][-1]] * extra
    row["version_runs"] = [row["version_runs"][0], start, end + extra]


_ROW_CHANGES: dict[str, Callable[[random.Random, Row], None]] = {
    "token-id": _token, "logprob": _logprob, "mask": _mask, "mask-and-runs": _mask_and_runs, "runs": _runs,
    "lengths": _lengths, "empty-completion": _empty_completion, "prompt-length": _prompt_length, "texts": _texts,
    "numbers": _numbers, "long": _long,
}  # fmt: skip
_GROUP_CHANGES = (
    "swap-prompts",
    "one-row",
    "no-baseline-flag",
    "all-baseline",
    "repeat-rows",
    "more-rows",
    "id",
    "mixed-ids",
    "swap-groups",
)


def values_of(rng: random.Random, groups: Groups, spare: Groups) -> str:
    """Change one group in place; return the name of the change."""
    name = rng.choice([*_ROW_CHANGES, *_GROUP_CHANGES])
    at = rng.randrange(len(groups))
    rows = groups[at]
    if name in _ROW_CHANGES:
        for row in rows if rng.random() < 0.4 else [rng.choice(rows)]:
            _ROW_CHANGES[name](rng, row)
    elif name == "swap-groups":
        rng.shuffle(groups)
    else:
        groups[at] = _changed_group(rng, name, rows, spare[rng.randrange(len(spare))])
    return name


def _changed_group(rng: random.Random, name: str, rows: list[Row], others: list[Row]) -> list[Row]:
    match name:
        case "swap-prompts":  # another task's samples under this task's id
            kept = ("group_id", "split", "attempt", "issued_version")
            return [{**theirs, **{key: rows[0][key] for key in kept}} for theirs in others]
        case "one-row":
            return rows[:1]
        case "no-baseline-flag" | "all-baseline":
            for row in rows if name == "all-baseline" else rows[-1:]:
                row["is_baseline"] = True
        case "repeat-rows":
            return [rows[0]] * len(rows)
        case "more-rows":
            return rows + others
        case "id" | "mixed-ids":
            changed = values.group_id(rng, rows[0]["group_id"])
            for row in rows if name == "id" else rows[1:]:
                row["group_id"] = changed
    return rows


def plausible_of(rng: random.Random, groups: Groups, _: Groups) -> str:
    """Make rows in place that only the model can tell from real ones: of other tokens, or other log-probabilities."""
    name = rng.choice(("other-tokens", "other-logprobs"))
    for row in groups[rng.randrange(len(groups))]:
        _, start, end = row["version_runs"][:3]
        for place in range(start, end - 1):
            if name == "other-tokens":
                row["token_ids"][place] = rng.randint(20, 40)
            else:
                row["behaviour_logprobs"][place] -= 0.05
    return name


def never_issued_of(rng: random.Random, groups: Groups) -> str:
    """Give rows in place ids that were not issued: later attempts at the same prompts, and later epochs."""
    name = rng.choice(("later-attempt", "later-epoch"))
    later = rng.choice((1, 1, 2, 30))
    for rows in groups:
        epoch, prompt, attempt = (int(part[1:]) for part in rows[0]["group_id"].split("."))
        if name == "later-attempt":
            attempt += later
        else:
            epoch, attempt = epoch + later, 0
        for row in rows:
            row["group_id"], row["attempt"] = f"e{epoch}.p{prompt}.a{attempt}", attempt
    return name


# ── size and bytes ────────────────────────────────────────────────────────────────────────────────────────


def bombs(rng: random.Random, data: bytes, _: bytes) -> tuple[str, bytes]:
    name, rows = rng.choice(("tokens", "text", "rows", "row-groups", "columns", "dictionary")), read(data)[0]
    match name:
        case "tokens":
            rows[0]["token_ids"], rows[0]["loss_mask"] = [0] * _BOMB_TOKENS, [False] * _BOMB_TOKENS
            groups = [rows[:1]]
        case "rows":
            groups = [rows[:1] * 20_000]
        case "row-groups":
            groups = [rows[:1]] * 500
        case "columns":
            table = pa.Table.from_pylist(rows, schema=SCHEMA)
            for number in range(1500):
                table = table.append_column(f"c{number}", pa.array([0] * table.num_rows))
            return name, write([table])
        case "text":
            rows[0]["completion_text"] = "a" * 30_000_000
            groups = [rows]
        case _:
            rows[0]["ground_truth"] = '"' + "b" * 20_000_000 + '"'
            groups = [rows]
    return name, write_rows(groups, compression="zstd")


def bytes_of(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    raw, name = (
        bytearray(data),
        rng.choice(("flip", "flip-footer", "flip-footer", "cut", "splice", "footer-size", "random", "empty")),
    )
    footer = int.from_bytes(raw[-8:-4], "little")
    if name == "flip":
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif name == "flip-footer":
        for _ in range(rng.choice((1, 1, 2, 6))):
            raw[rng.randrange(len(raw) - 8 - footer, len(raw) - 8)] = rng.randrange(256)
    elif name == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif name == "splice":
        half = rng.randrange(min(len(raw), len(other)))
        raw[:half] = other[:half]
    elif name == "footer-size":
        raw[-8:-4] = rng.choice((0, 1, footer - 1, footer + 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little")
    elif name == "random":
        raw = bytearray(b"PAR1" + rng.randbytes(300) + b"PAR1")
    else:
        raw = bytearray()
    return name, bytes(raw)


def described(fields: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the fields of an announcement with summaries that are those of the groups."""
    for number, (summary, rows) in enumerate(zip(fields["groups"], groups, strict=False)):
        runs = [list(zip(*(row["version_runs"][part::3] for part in range(3)), strict=False)) for row in rows]
        versions = [version for row in runs for version, _, _ in row]
        summary.update(
            group_id=rows[0]["group_id"],
            row_group=number,
            attempt=rows[0]["attempt"],
            issued_version=rows[0]["issued_version"],
            prompt_tokens=rows[0]["num_prompt_tokens"],
            completion_tokens=[max(0, sum(end - start for _, start, end in row)) for row in runs],
            finish_reasons=[row["finish_reason"] for row in rows],
            reward_name=rows[0]["reward_name"],
            split=rows[0]["split"],
            has_baseline=bool(rows[-1]["is_baseline"]),
        )
        if versions:
            summary.update(oldest_version=min(versions), newest_version=max(versions))
    return fields
