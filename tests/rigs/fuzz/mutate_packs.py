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
_BOMB_TOKENS = 4_000_000


def read(data: bytes) -> list[list[Row]]:
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


def write_rows(groups: list[list[Row]], schema: pa.Schema = SCHEMA) -> bytes:
    return write([pa.Table.from_pylist(rows, schema=schema) for rows in groups])


# ── schema ────────────────────────────────────────────────────────────────────────────────────────────────


def _as_struct(value: Any) -> Any:
    return {"a": value}


_COLUMNS: dict[str, Callable[[list[Any]], pa.Array]] = {
    "struct": lambda column: pa.array([_as_struct(value) for value in column]),
    "structs": lambda column: pa.array([[{"a": 1}] if isinstance(value, list) else {"b": "x"} for value in column]),
    "int64": lambda column: pa.array([list(map(_int, v)) if isinstance(v, list) else _int(v) for v in column]),
    "double": lambda column: pa.array([[float(_int(x)) for x in v] if isinstance(v, list) else 0.5 for v in column]),
    "text": lambda column: pa.array([[str(x) for x in v] if isinstance(v, list) else str(v) for v in column]),
    "binary": lambda column: pa.array([str(value).encode() for value in column], pa.binary()),
    "large-list": lambda column: pa.array([v if isinstance(v, list) else [v] for v in column], _large(column)),
    "nested-list": lambda column: pa.array([[value] for value in column]),
    "nulls": lambda column: pa.array([None] * len(column), pa.string()),
    "null-type": lambda column: pa.array([None] * len(column), pa.int32()),
    "null-items": lambda column: pa.array([[None, *v[1:]] if isinstance(v, list) and v else None for v in column]),
    "dictionary": lambda column: pa.array([str(value) for value in column]).dictionary_encode(),
    "map": lambda column: pa.array([[("k", 1)] for _ in column], pa.map_(pa.string(), pa.int32())),
    "boolean": lambda column: pa.array([True for _ in column]),
    "timestamp": lambda column: pa.array([1 for _ in column], pa.timestamp("ns")),
    "fixed-list": lambda column: pa.array([[1, 2] for _ in column], pa.list_(pa.int32(), 2)),
    "float16": lambda column: pa.array([np.float16(1.0) for _ in column], pa.float16()),
    "decimal": lambda column: pa.array([1 for _ in column], pa.decimal128(30, 2)),
    "uint64": lambda column: pa.array([2**64 - 1 for _ in column], pa.uint64()),
}


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 7


def _large(column: list[Any]) -> pa.DataType:
    first = column[0] if column and isinstance(column[0], list) else column
    return pa.large_list(pa.array(first).type)


def schema_of(rng: random.Random, groups: list[list[Row]]) -> tuple[str, bytes]:
    tables = [pa.Table.from_pylist(rows, schema=SCHEMA) for rows in groups]
    name = rng.choice([*_COLUMNS, *_COLUMNS, "drop", "repeat", "add", "rename", "order", "tag", "no-rows", "nullable"])
    column = rng.choice(
        SCHEMA.names if rng.random() < 0.4 else ["token_ids", "loss_mask", "behaviour_logprobs", "version_runs"]
    )
    at = SCHEMA.names.index(column)
    if name in _COLUMNS:
        tables = [t.set_column(at, column, _COLUMNS[name](t.column(at).to_pylist())) for t in tables]
    elif name == "drop":
        tables = [t.remove_column(at) for t in tables]
    elif name == "repeat":
        tables = [t.append_column(column, t.column(at)) for t in tables]
    elif name == "add":
        added = rng.choice(("rewards", "x" * 300, ""))
        tables = [t.append_column(added, pa.array([1] * t.num_rows)) for t in tables]
    elif name == "rename":
        tables = [t.rename_columns([n + "_" if n == column else n for n in t.column_names]) for t in tables]
    elif name == "order":
        names = rng.sample(SCHEMA.names, len(SCHEMA.names))
        tables = [t.select(names) for t in tables]
    elif name == "tag":
        return name, write(tables).replace(SCHEMA_TAG.encode(), rng.choice((b"group_pack.v2", b"\xff" * 13)))
    elif name == "no-rows":
        tables = [t.slice(0, 0) for t in tables]
    else:
        tables = [pa.Table.from_arrays(t.columns, names=t.column_names) for t in tables]
    return f"{name} {column}" if name in _COLUMNS else name, write(tables)


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


def values_of(rng: random.Random, groups: list[list[Row]], spare: list[list[Row]]) -> tuple[str, list[list[Row]]]:
    name = rng.choice([*_ROW_CHANGES, *_GROUP_CHANGES])
    at = rng.randrange(len(groups))
    rows = groups[at]
    if name in _ROW_CHANGES:
        for row in rows if rng.random() < 0.4 else [rng.choice(rows)]:
            _ROW_CHANGES[name](rng, row)
    else:
        groups[at] = _changed_group(rng, name, rows, spare[rng.randrange(len(spare))])
        if name == "swap-groups":
            rng.shuffle(groups)
    return name, groups


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


def plausible_of(rng: random.Random, groups: list[list[Row]]) -> tuple[str, list[list[Row]]]:
    """Return rows that only the model can tell from real ones: other tokens, or other log-probabilities."""
    name = rng.choice(("other-tokens", "other-logprobs"))
    for row in groups[rng.randrange(len(groups))]:
        _, start, end = row["version_runs"][:3]
        for place in range(start, end - 1):
            if name == "other-tokens":
                row["token_ids"][place] = rng.randint(20, 40)
            else:
                row["behaviour_logprobs"][place] -= 0.05
    return name, groups


def never_issued_of(rng: random.Random, groups: list[list[Row]]) -> tuple[str, list[list[Row]]]:
    """Return rows of the same prompts under ids that were not issued: later attempts, and later epochs."""
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
    return name, groups


# ── size and bytes ────────────────────────────────────────────────────────────────────────────────────────


def bombs(rng: random.Random, groups: list[list[Row]]) -> tuple[str, bytes]:
    name = rng.choice(("tokens", "text", "rows", "row-groups", "columns", "dictionary"))
    rows = groups[0]
    if name == "tokens":
        row = rows[0]
        row["token_ids"], row["loss_mask"] = [0] * _BOMB_TOKENS, [False] * _BOMB_TOKENS
        return name, write([pa.Table.from_pylist([row], schema=SCHEMA)], compression="zstd")
    if name == "text":
        rows[0]["completion_text"] = "a" * 30_000_000
        return name, write([pa.Table.from_pylist(rows, schema=SCHEMA)], compression="zstd")
    if name == "rows":
        return name, write([pa.Table.from_pylist(rows[:1] * 20_000, schema=SCHEMA)], compression="zstd")
    if name == "row-groups":
        return name, write([pa.Table.from_pylist(rows[:1], schema=SCHEMA)] * 500, compression="zstd")
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    if name == "columns":
        for number in range(1500):
            table = table.append_column(f"c{number}", pa.array([0] * table.num_rows))
        return name, write([table])
    rows[0]["ground_truth"] = '"' + "b" * 20_000_000 + '"'
    return name, write([pa.Table.from_pylist(rows, schema=SCHEMA)], compression="zstd", use_dictionary=True)


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


def described(fields: dict[str, Any], groups: list[list[Row]], key: str, data: bytes, sha256: str) -> dict[str, Any]:
    fields["pack"] = {"key": key, "size_bytes": len(data), "sha256": sha256}
    for number, (summary, rows) in enumerate(zip(fields["groups"], groups, strict=False)):
        runs = [_triples(row["version_runs"]) for row in rows]
        found = [version for row in runs for version, _, _ in row]
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
        if found:
            summary.update(oldest_version=min(found), newest_version=max(found))
    return fields


def _triples(runs: list[int]) -> list[tuple[int, int, int]]:
    return [(runs[i], runs[i + 1], runs[i + 2]) for i in range(0, len(runs) - 2, 3)]
