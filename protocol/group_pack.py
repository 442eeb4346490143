"""A pack of groups as one immutable Parquet object: one row group for each group, one row a trajectory.

Parquet, so that DuckDB, polars and pandas can read a stored run. Measured
(12 groups of 8 x 30 tokens): zstd costs three times the CPU of LZ4 for row groups this small, and a
dictionary only adds pages. On 8 x 4096 tokens the bytes of a number are stored apart (BYTE_STREAM_SPLIT: the
upper ones of token ids are nearly all zero) and only the token ids are worth zstd: a twentieth larger than zstd for
everything, and a third less CPU for writing and reading. A dictionary pays for columns that a group's rows share,
never for token ids, log-probabilities or completions.
Rewards are not stored here but sent in `GroupScored`: the object stays immutable when it is scored,
and can be scored again later by another reward.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.errors import PackError
from penstock.protocol.facts import RewardRequest
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun

SCHEMA_TAG = "group_pack.v1"
_LARGE_TOKENS = 8192  # tokens in a group from which on zstd and dictionaries pay

_COMMON = (  # columns with equal, or nearly equal, values in the rows of a group
    "group_id",
    "split",
    "prompt_text",
    "finish_reason",
    "reward_name",
    "data_source",
    "ground_truth",
    "extra_info",
)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))  # readers need no null check


SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("trajectory_index", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("issued_version", pa.int64(), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", _list(pa.int32()), nullable=False),
        pa.field("loss_mask", _list(pa.bool_()), nullable=False),
        pa.field("behaviour_logprobs", _list(pa.float32()), nullable=False),
        pa.field("version_runs", _list(pa.int64()), nullable=False),  # version, start, end, version, ...
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("completion_text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("reward_name", pa.string(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("ground_truth", pa.string(), nullable=True),  # JSON
        pa.field("extra_info", pa.string(), nullable=False),  # JSON
        pa.field("is_baseline", pa.bool_(), nullable=False),  # greedy, scored and not trained on; absent: none is
    ],
    metadata={b"schema": SCHEMA_TAG.encode()},
)
_TOKENS, _LOGPROBS = "token_ids.list.element", "behaviour_logprobs.list.element"
_LEAVES = [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in SCHEMA]
_LARGE = {
    "compression": dict.fromkeys(_LEAVES, "lz4") | {_TOKENS: "zstd"},
    "compression_level": {_TOKENS: 1},
    "use_dictionary": list(_COMMON),
    "use_byte_stream_split": [_TOKENS, _LOGPROBS],
}
_SMALL = {"compression": "lz4", "use_dictionary": False}
_TEXT_COLUMNS = [
    "group_id",
    "trajectory_index",
    "num_prompt_tokens",
    "prompt_text",
    "completion_text",
    "finish_reason",
    "reward_name",
    "data_source",
    "ground_truth",
    "extra_info",
]


def encode(groups: Sequence[Group]) -> bytes:
    """Encode groups, in order, as one Parquet object with one row group each; raises PackError for what has no column."""
    if not groups:
        raise PackError("a pack needs at least one group")
    sink = io.BytesIO()
    try:
        table = _table(groups)
    except (pa.ArrowException, OverflowError, ValueError) as err:  # a task may state an attempt beyond 32 bits
        raise PackError(
            f"group {groups[0].group_id} and {len(groups) - 1} more do not fit {SCHEMA_TAG}: {err}"
        ) from None
    large = sum(len(row.token_ids) for group in groups for row in group.trajectories) > _LARGE_TOKENS * len(groups)
    options: dict[str, Any] = _LARGE if large else _SMALL
    with pq.ParquetWriter(sink, SCHEMA, write_statistics=False, store_schema=False, **options) as writer:
        start = 0
        for group in groups:
            size = len(group.trajectories)
            writer.write_table(table.slice(start, size), row_group_size=size)
            start += size
        writer.add_key_value_metadata({"schema": SCHEMA_TAG})
    return sink.getvalue()


def _lists(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), type=kind), type=_list(kind))


def _table(groups: Sequence[Group]) -> pa.Table:
    rows = [(group, index, row) for group in groups for index, row in enumerate(group.trajectories)]
    owners = [group for group, _, _ in rows]
    trajectories = [row for _, _, row in rows]
    runs = [np.array(row.version_runs, dtype=np.int64).reshape(-1) for row in trajectories]
    columns: list[Any] = [
        pa.array([group.group_id for group in owners], pa.string()),
        pa.array([index for _, index, _ in rows], pa.int32()),
        pa.array([group.split for group in owners], pa.string()),
        pa.array([group.attempt for group in owners], pa.int32()),
        pa.array([group.issued_version for group in owners], pa.int64()),
        pa.array([group.num_prompt_tokens for group in owners], pa.int32()),
        _lists([row.token_ids for row in trajectories], pa.int32()),
        _lists([row.loss_mask for row in trajectories], pa.bool_()),
        _lists([row.behaviour_logprobs for row in trajectories], pa.float32()),
        _lists(runs, pa.int64()),
        pa.array([group.prompt_text for group in owners], pa.string()),
        pa.array([row.completion_text for row in trajectories], pa.string()),
        pa.array([row.finish_reason for row in trajectories], pa.string()),
        pa.array([group.reward.name for group in owners], pa.string()),
        pa.array([group.reward.data_source for group in owners], pa.string()),
        pa.array([group.reward.ground_truth for group in owners], pa.string()),
        pa.array([group.reward.extra_info for group in owners], pa.string()),
        pa.array([row.is_baseline for row in trajectories], pa.bool_()),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _open(data: bytes) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
    except (pa.ArrowException, OSError, ValueError) as err:
        raise PackError(f"not a Parquet object ({err}); {len(data)} bytes") from None
    tag = (file.metadata.metadata or {}).get(b"schema", b"").decode("utf-8", "replace")
    if tag != SCHEMA_TAG:
        raise PackError(f"expected schema {SCHEMA_TAG}, got {tag or 'none'}")
    return file


def _read(file: pq.ParquetFile, row_groups: Sequence[int] | None, columns: list[str] | None) -> list[pa.Table]:
    wanted = list(range(file.num_row_groups)) if row_groups is None else list(row_groups)
    for number in wanted:
        if not 0 <= number < file.num_row_groups:
            raise PackError(f"row group {number} of a pack that has {file.num_row_groups}")
    try:
        table = file.read_row_groups(wanted, columns=columns, use_threads=False).combine_chunks()
    except (pa.ArrowException, OSError, KeyError, ValueError) as err:
        raise PackError(f"row groups {wanted} are not readable: {err}") from None
    tables, start = [], 0
    for number in wanted:
        size = file.metadata.row_group(number).num_rows
        tables.append(table.slice(start, size))
        start += size
    return tables


def decode(data: bytes, row_groups: Sequence[int] | None = None) -> list[Group]:
    """Decode the groups of the given row groups (all, when None), arrays without a copy per token.

    Raises PackError for anything that is not a pack of this schema.
    """
    return [_group(table) for table in _read(_open(data), row_groups, None)]


def decode_texts(data: bytes, row_groups: Sequence[int]) -> list[GroupTexts]:
    """Decode only the columns that a reward needs; token columns are not read."""
    return [GroupTexts.from_table(table) for table in _read(_open(data), row_groups, _TEXT_COLUMNS)]


def _slices(table: pa.Table, name: str) -> list[np.ndarray]:
    column = table.column(name).chunk(0)
    offsets = column.offsets.to_numpy()
    start = offsets[0]  # a slice keeps the offsets of the whole column
    values = column.values.slice(start, offsets[-1] - start).to_numpy(zero_copy_only=False)
    offsets = offsets - start
    return [values[offsets[i] : offsets[i + 1]] for i in range(len(column))]


def _group(table: pa.Table) -> Group:
    try:
        arrays = zip(
            _slices(table, "token_ids"),
            _slices(table, "loss_mask"),
            _slices(table, "behaviour_logprobs"),
            _slices(table, "version_runs"),
            table.column("completion_text").to_pylist(),
            table.column("finish_reason").to_pylist(),
            _baselines(table),
            strict=True,
        )
        trajectories = tuple(
            Trajectory(
                token_ids=tokens,
                loss_mask=mask,
                behaviour_logprobs=logprobs,
                version_runs=tuple(VersionRun(PolicyVersion(v), s, e) for v, s, e in runs.reshape(-1, 3).tolist()),
                finish_reason=finish,
                completion_text=text,
                is_baseline=is_baseline,
            )
            for tokens, mask, logprobs, runs, text, finish, is_baseline in arrays
        )
        return Group(
            group_id=_first(table, "group_id"),
            split=_first(table, "split"),
            attempt=_first(table, "attempt"),
            issued_version=_first(table, "issued_version"),
            prompt_text=_first(table, "prompt_text"),
            num_prompt_tokens=_first(table, "num_prompt_tokens"),
            reward=_reward(table),
            trajectories=trajectories,
        )
    except (KeyError, ValueError, IndexError, pa.ArrowException) as err:
        raise PackError(f"pack rows do not fit {SCHEMA_TAG}: {err}") from None


def _baselines(table: pa.Table) -> list[bool]:
    if "is_baseline" not in table.column_names:  # written before the column existed
        return [False] * table.num_rows
    return table.column("is_baseline").to_pylist()


def _first(table: pa.Table, name: str) -> Any:
    return table.column(name)[0].as_py()


def _reward(table: pa.Table) -> RewardRequest:
    return RewardRequest(
        name=_first(table, "reward_name"),
        data_source=_first(table, "data_source"),
        ground_truth=_first(table, "ground_truth"),
        extra_info=_first(table, "extra_info"),
    )


@dataclass(frozen=True, slots=True)
class GroupTexts:
    """Prompt, completions and reward request of one group, without its tokens."""

    group_id: str
    prompt_text: str
    completions: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    reward: RewardRequest
    num_prompt_tokens: int = 0
    completion_tokens: tuple[int, ...] = ()  # from the message that announced the pack; () where it is unknown

    @classmethod
    def from_table(cls, table: pa.Table) -> GroupTexts:
        """Build from one row group; raises PackError when the columns do not fit."""
        try:
            return cls(
                group_id=_first(table, "group_id"),
                prompt_text=_first(table, "prompt_text"),
                num_prompt_tokens=_first(table, "num_prompt_tokens"),
                completions=tuple(table.column("completion_text").to_pylist()),
                finish_reasons=tuple(table.column("finish_reason").to_pylist()),
                reward=_reward(table),
            )
        except (KeyError, ValueError, IndexError, pa.ArrowException) as err:
            raise PackError(f"pack rows do not fit {SCHEMA_TAG}: {err}") from None
