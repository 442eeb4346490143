"""A pack of groups as one immutable Parquet object: one row group for each group, one row a trajectory.

Parquet because a stored run must be open to anybody with DuckDB, polars or pandas. Dictionary
encoding only for the texts: on token ids and log-probabilities it makes objects larger.
Rewards are not in here, they travel in `GroupScored`: the object stays immutable when it is scored,
and can be scored again later by another reward.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from protocol.errors import PackError
from protocol.facts import RewardRequest
from protocol.trajectory import Group, Trajectory
from protocol.versions import PolicyVersion, VersionRun

SCHEMA_TAG = "group_pack.v1"
MAX_TOKENS_PER_TRAJECTORY = 16_777_216

_TEXTS = (
    "group_id",
    "split",
    "prompt_text",
    "completion_text",
    "finish_reason",
    "reward_name",
    "data_source",
    "ground_truth",
    "extra_info",
)

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("trajectory_index", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("issued_version", pa.int64(), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("version_runs", pa.list_(pa.int64()), nullable=False),  # version, start, end, version, ...
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("completion_text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("reward_name", pa.string(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("ground_truth", pa.string(), nullable=True),  # JSON
        pa.field("extra_info", pa.string(), nullable=False),  # JSON
    ],
    metadata={b"schema": SCHEMA_TAG.encode()},
)
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
    """Encode groups, in order, as one Parquet object with one row group each."""
    if not groups:
        raise PackError("a pack needs at least one group")
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(_TEXTS),
        write_statistics=False,
        store_schema=False,
    ) as writer:
        for group in groups:
            writer.write_table(_table(group), row_group_size=len(group.trajectories))
    return sink.getvalue()


def _lists(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), type=kind))


def _table(group: Group) -> pa.Table:
    rows = group.trajectories
    same = [
        group.group_id,
        group.split,
        group.prompt_text,
        group.reward.name,
        group.reward.data_source,
        group.reward.ground_truth,
        group.reward.extra_info,
    ]
    group_id, split, prompt, reward_name, source, truth, extra = ([value] * len(rows) for value in same)
    runs = [np.array([n for run in row.version_runs for n in run], dtype=np.int64) for row in rows]
    columns: list[Any] = [
        pa.array(group_id, pa.string()),
        pa.array(range(len(rows)), pa.int32()),
        pa.array(split, pa.string()),
        pa.array([group.attempt] * len(rows), pa.int32()),
        pa.array([group.issued_version] * len(rows), pa.int64()),
        pa.array([group.num_prompt_tokens] * len(rows), pa.int32()),
        _lists([row.token_ids for row in rows], pa.int32()),
        _lists([row.loss_mask for row in rows], pa.bool_()),
        _lists([row.behaviour_logprobs for row in rows], pa.float32()),
        _lists(runs, pa.int64()),
        pa.array(prompt, pa.string()),
        pa.array([row.completion_text for row in rows], pa.string()),
        pa.array([row.finish_reason for row in rows], pa.string()),
        pa.array(reward_name, pa.string()),
        pa.array(source, pa.string()),
        pa.array(truth, pa.string()),
        pa.array(extra, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _open(data: bytes) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as err:
        raise PackError(f"not a Parquet object ({err}); {len(data)} bytes") from None
    tag = (file.metadata.metadata or {}).get(b"schema", b"").decode("utf-8", "replace")
    if tag != SCHEMA_TAG:
        raise PackError(f"expected schema {SCHEMA_TAG}, got {tag or 'none'}")
    return file


def _read(file: pq.ParquetFile, row_group: int, columns: list[str] | None) -> pa.Table:
    if not 0 <= row_group < file.num_row_groups:
        raise PackError(f"row group {row_group} of a pack that has {file.num_row_groups}")
    try:
        return file.read_row_group(row_group, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, KeyError) as err:
        raise PackError(f"row group {row_group} is not readable: {err}") from None


def decode(data: bytes, row_groups: Sequence[int] | None = None) -> list[Group]:
    """Decode the groups of the given row groups (all, when None), arrays without a copy per token.

    Raises PackError for anything that is not a pack of this schema.
    """
    file = _open(data)
    wanted = range(file.num_row_groups) if row_groups is None else row_groups
    return [_group(_read(file, number, None)) for number in wanted]


def _slices(table: pa.Table, name: str) -> list[np.ndarray]:
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] for i in range(len(column))]


def _group(table: pa.Table) -> Group:
    try:
        scalar = {
            name: table.column(name)[0].as_py()
            for name in (
                "group_id",
                "split",
                "attempt",
                "issued_version",
                "prompt_text",
                "num_prompt_tokens",
                "reward_name",
                "data_source",
                "ground_truth",
                "extra_info",
            )
        }
        texts = table.column("completion_text").to_pylist()
        finishes = table.column("finish_reason").to_pylist()
        arrays = zip(
            _slices(table, "token_ids"),
            _slices(table, "loss_mask"),
            _slices(table, "behaviour_logprobs"),
            _slices(table, "version_runs"),
            texts,
            finishes,
            strict=True,
        )
        trajectories = tuple(
            Trajectory(
                token_ids=tokens,
                loss_mask=mask,
                behaviour_logprobs=logprobs,
                version_runs=tuple(
                    VersionRun(PolicyVersion(int(v)), int(s), int(e)) for v, s, e in runs.reshape(-1, 3)
                ),
                finish_reason=finish,
                completion_text=text,
            )
            for tokens, mask, logprobs, runs, text, finish in arrays
        )
        reward = RewardRequest(
            name=scalar["reward_name"],
            data_source=scalar["data_source"],
            ground_truth=scalar["ground_truth"],
            extra_info=scalar["extra_info"],
        )
    except (KeyError, ValueError, IndexError, pa.ArrowException) as err:
        raise PackError(f"pack rows do not fit {SCHEMA_TAG}: {err}") from None
    return Group(
        group_id=scalar["group_id"],
        split=scalar["split"],
        attempt=scalar["attempt"],
        issued_version=scalar["issued_version"],
        prompt_text=scalar["prompt_text"],
        num_prompt_tokens=scalar["num_prompt_tokens"],
        reward=reward,
        trajectories=trajectories,
    )


def decode_texts(data: bytes, row_groups: Sequence[int]) -> list[GroupTexts]:
    """Decode only what a reward needs; token columns are never touched."""
    file = _open(data)
    return [GroupTexts.from_table(_read(file, number, _TEXT_COLUMNS)) for number in row_groups]


class GroupTexts:
    """Prompt, completions and reward request of one group, without its tokens."""

    __slots__ = ("completions", "finish_reasons", "group_id", "num_prompt_tokens", "prompt_text", "reward")

    def __init__(
        self,
        *,
        group_id: str,
        prompt_text: str,
        completions: tuple[str, ...],
        finish_reasons: tuple[str, ...],
        reward: RewardRequest,
        num_prompt_tokens: int = 0,
    ) -> None:
        """Hold the texts of one group."""
        self.group_id = group_id
        self.prompt_text = prompt_text
        self.completions = completions
        self.finish_reasons = finish_reasons
        self.reward = reward
        self.num_prompt_tokens = num_prompt_tokens

    @classmethod
    def from_table(cls, table: pa.Table) -> GroupTexts:
        """Build from one row group; raises PackError when the columns do not fit."""
        try:
            first = {
                name: table.column(name)[0].as_py()
                for name in (
                    "group_id",
                    "prompt_text",
                    "num_prompt_tokens",
                    "reward_name",
                    "data_source",
                    "ground_truth",
                    "extra_info",
                )
            }
            return cls(
                group_id=first["group_id"],
                prompt_text=first["prompt_text"],
                num_prompt_tokens=first["num_prompt_tokens"],
                completions=tuple(table.column("completion_text").to_pylist()),
                finish_reasons=tuple(table.column("finish_reason").to_pylist()),
                reward=RewardRequest(
                    name=first["reward_name"],
                    data_source=first["data_source"],
                    ground_truth=first["ground_truth"],
                    extra_info=first["extra_info"],
                ),
            )
        except (KeyError, ValueError, IndexError) as err:
            raise PackError(f"pack rows do not fit {SCHEMA_TAG}: {err}") from None
