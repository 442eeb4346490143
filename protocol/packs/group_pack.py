"""A pack of groups as one immutable Parquet object: one row group for each group, one row a trajectory.

Parquet, so that DuckDB, polars and pandas can read a stored run. Measured
(12 groups of 8 x 30 tokens): zstd costs three times the CPU of LZ4 for row groups this small, and a
dictionary only adds pages. On 8 x 4096 tokens the bytes of a number are stored apart (BYTE_STREAM_SPLIT: the
upper ones of token ids are nearly all zero) and only the token ids are worth zstd: a twentieth larger than zstd for
everything, and a third less CPU for writing and reading. A dictionary pays for columns that a group's rows share,
never for token ids, log-probabilities or completions.
A pack that holds a group of episodes has further columns (`episode_columns.py`), and stores what an episode's rows
share once. Images, a teacher's log-probabilities and the experts of tokens have separate columns
(`optional_columns.py`). Rewards are not stored here but sent in `GroupScored`: the object stays immutable when it is
scored, and can be scored again later by another reward.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.protocol.errors import PackError
from penstock.protocol.groups import GeneratedGroup
from penstock.protocol.packs import episode_columns, optional_columns, pack_bounds, pack_footer
from penstock.protocol.packs.group_texts import TEXT_COLUMNS, GroupTexts, rewards_of, texts_of
from penstock.protocol.packs.pack_rows import Column, Rows, column, list_of, rows_of
from penstock.protocol.trajectory import Group, Trajectory, check_token_values
from penstock.protocol.versions import PolicyVersion, VersionRun

SCHEMA_TAG = "group_pack.v1"
_LARGE_TOKENS = 8192  # tokens in a group from which on zstd and dictionaries pay

_COMMON = (  # columns with equal, or nearly equal, values in the rows of a group
    "group_id", "split", "prompt_text", "finish_reason", "reward_name", "data_source", "ground_truth", "extra_info",
)  # fmt: skip

_COLUMNS = (
    column("group_id", pa.string(), lambda stored: stored.group.group_id),
    column("trajectory_index", pa.int32(), lambda stored: stored.index),
    column("split", pa.string(), lambda stored: stored.group.split),
    column("attempt", pa.int32(), lambda stored: stored.group.attempt),
    column("issued_version", pa.int64(), lambda stored: stored.group.issued_version),
    column("num_prompt_tokens", pa.int32(), lambda stored: stored.group.num_prompt_tokens),
    column("token_ids", list_of(pa.int32()), lambda stored: stored.row.token_ids[stored.shared :]),
    column("loss_mask", list_of(pa.bool_()), lambda stored: stored.row.loss_mask[stored.shared :]),
    column("behaviour_logprobs", list_of(pa.float32()), lambda stored: stored.row.behaviour_logprobs[stored.shared :]),
    column(  # version, start, end, version, ...
        "version_runs",
        list_of(pa.int64()),
        lambda stored: np.array(stored.row.version_runs, dtype=np.int64).reshape(-1),
    ),
    column("prompt_text", pa.string(), lambda stored: stored.group.prompt_text),
    column("completion_text", pa.string(), lambda stored: stored.row.completion_text),
    column("finish_reason", pa.string(), lambda stored: stored.row.finish_reason),
    column("reward_name", pa.string(), lambda stored: stored.group.reward.name),
    column("data_source", pa.string(), lambda stored: stored.group.reward.data_source),
    column("ground_truth", pa.string(), lambda stored: stored.group.reward.ground_truth, nullable=True),  # JSON
    column("extra_info", pa.string(), lambda stored: stored.group.reward.extra_info),  # JSON
    # greedy, scored and not trained on; absent: none is
    column("is_baseline", pa.bool_(), lambda stored: stored.row.is_baseline),
)
_OF_GROUP = ("group_id", "split", "attempt", "issued_version", "prompt_text", "num_prompt_tokens")
SCHEMA = pa.schema([entry.field for entry in _COLUMNS], metadata={b"schema": SCHEMA_TAG.encode()})
_FURTHER = (
    episode_columns.COLUMNS,
    optional_columns.TEACHER_COLUMNS,
    optional_columns.EXPERT_COLUMNS,
    optional_columns.IMAGE_COLUMNS,
)


def _columns(present: Sequence[bool]) -> list[Column]:
    """Return all columns of a pack; ``present``: whether there are episodes, a teacher, experts and images."""
    return [*_COLUMNS, *itertools.chain(*itertools.compress(_FURTHER, present))]


SCHEMAS = {  # experts and images are never both present
    present: pa.schema([entry.field for entry in _columns(present)], SCHEMA.metadata)
    for present in itertools.product((False, True), repeat=len(_FURTHER))
    if not (present[2] and present[3])
}
_TOKENS, _LOGPROBS = "token_ids.list.element", "behaviour_logprobs.list.element"
_MAY_BE_NULL = frozenset(("ground_truth", *episode_columns.MAY_BE_NULL))
_SMALL = {"compression": "lz4", "use_dictionary": False}


def _large(schema: pa.Schema) -> dict[str, Any]:
    leaves = [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in schema]
    dense = [name for name in (_TOKENS, optional_columns.EXPERTS) if name in leaves]
    return {
        "compression": dict.fromkeys(leaves, "lz4") | dict.fromkeys(dense, "zstd"),
        "compression_level": dict.fromkeys(dense, 1),
        "use_dictionary": list(_COMMON),
        "use_byte_stream_split": [_TOKENS, _LOGPROBS],
    }


def encode(groups: Sequence[Group]) -> bytes:
    """Encode groups, in order, as one Parquet object, a row group each; raises PackError for what has no column."""
    if not groups:
        raise PackError("a pack needs at least one group")
    sink = io.BytesIO()
    try:
        table = _table(groups)
    except (pa.ArrowException, OverflowError, ValueError) as err:  # a task may state an attempt beyond 32 bits
        first, more = groups[0].group_id, len(groups) - 1
        raise PackError(f"group {first} and {more} more do not fit {SCHEMA_TAG}: {err}") from None
    large = sum(len(row.token_ids) for group in groups for row in group.trajectories) > _LARGE_TOKENS * len(groups)
    options: dict[str, Any] = _large(table.schema) if large else _SMALL
    with pq.ParquetWriter(sink, table.schema, write_statistics=False, store_schema=False, **options) as writer:
        start = 0
        for group in groups:
            size = len(group.trajectories)
            writer.write_table(table.slice(start, size), row_group_size=size)
            start += size
        writer.add_key_value_metadata({"schema": SCHEMA_TAG})
    return sink.getvalue()


def _table(groups: Sequence[Group]) -> pa.Table:
    present = (
        any(group.episodes for group in groups),
        any(group.teacher is not None for group in groups),
        any(group.routers is not None for group in groups),
        any(group.image_processor is not None for group in groups),
    )
    if present not in SCHEMAS:
        raise PackError(
            f"group {groups[0].group_id} and {len(groups) - 1} more: rows with images have no experts of their tokens"
        )
    for group in groups:
        optional_columns.check(group)
    rows = list(rows_of(groups))
    return pa.Table.from_arrays([entry.array(rows) for entry in _columns(present)], schema=SCHEMAS[present])


def decode(
    data: bytes,
    row_groups: Sequence[int] | None = None,
    *,
    described: Sequence[GeneratedGroup] | None = None,
    vocab_size: int | None = None,
) -> list[Group]:
    """Decode the groups of ``row_groups`` (all, when None), arrays without a copy per token.

    ``described`` is the message's description of each of them: a pack that differs from it is refused. Token ids are
    below ``vocab_size``; None: not known. Raises PackError for anything that is no pack of this schema.
    """
    with _refusing():
        rows = _read(data, row_groups, None, described)
        groups = _groups(rows, vocab_size)
        for group, description in zip(groups, described or (), strict=described is not None):
            group.check_described_by(description)
            group.check_prompt()
        return groups


def decode_texts(
    data: bytes, row_groups: Sequence[int], *, described: Sequence[GeneratedGroup] | None = None
) -> list[GroupTexts]:
    """Decode only the columns that a reward needs; token columns are not read. Raises as `decode`."""
    with _refusing():
        texts = texts_of(_read(data, row_groups, TEXT_COLUMNS, described))
        for text, description in zip(texts, described or (), strict=described is not None):
            text.check_described_by(description)
        return texts


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise PackError for whatever the block raises: a pack that cannot be read must never end its reader."""
    try:
        yield
    except PackError:
        raise
    except Exception as err:  # noqa: BLE001  whatever Parquet or NumPy raise
        raise PackError(f"pack rows do not fit {SCHEMA_TAG}: {type(err).__name__}: {str(err)[:500]}") from None


def _read(
    data: bytes,
    row_groups: Sequence[int] | None,
    names: Sequence[str] | None,
    described: Sequence[GeneratedGroup] | None,
) -> Rows:
    footer = pack_bounds.check_footer(data)
    file = pq.ParquetFile(pa.BufferReader(data))
    metadata = file.metadata
    keys = metadata.metadata or {}
    if (tag := keys.get(b"schema", b"")) != SCHEMA_TAG.encode():
        raise PackError(f"expected schema {SCHEMA_TAG}, got {tag[:100].decode('utf-8', 'replace') or 'none'}")
    columns = pack_bounds.check_schema(file, _accepted(), keys.keys())
    stored = pack_footer.row_groups(data, footer, columns)
    wanted = list(range(len(stored))) if row_groups is None else list(row_groups)
    numbered = [(i, column) for i, column in enumerate(columns) if names is None or column.path in names]
    starts = [0, *itertools.accumulate(pack_bounds.check_pages(data, stored, wanted, numbered, described))]
    present = None if names is None else [column.path for _, column in numbered]
    table = file.read_row_groups(wanted, columns=present, use_threads=False).combine_chunks()
    if len(table) != starts[-1] or not wanted:
        raise PackError(f"{len(table)} rows in row groups {wanted[:8]}, the footer says {starts[-1]}")
    return Rows(table, starts, _MAY_BE_NULL)


@functools.cache
def _accepted() -> tuple[pa.Schema, ...]:
    """Return the schema of packs, and their former ones: without baselines, and with fields that may hold nulls."""
    elements = [f.with_type(pa.list_(f.type.value_type)) if pa.types.is_list(f.type) else f for f in SCHEMA]
    field_lists = (SCHEMA, elements, [f.with_nullable(True) for f in elements])
    schemas = [pa.schema(fields, SCHEMA.metadata) for fields in field_lists]
    return (*SCHEMAS.values(), *schemas, *(s.remove(s.get_field_index("is_baseline")) for s in schemas))


def _groups(rows: Rows, vocab_size: int | None) -> list[Group]:
    spans = episode_columns.spans(rows)
    trajectories = _trajectories(rows, vocab_size, spans)
    episodes = episode_columns.Episodes(rows, trajectories) if any(spans) else None
    columns = zip(
        spans,
        optional_columns.teachers_of_groups(rows, trajectories, vocab_size),
        rows.each_group(*_OF_GROUP),
        rewards_of(rows),
        itertools.pairwise(rows.starts),
        strict=True,
    )
    numbers = rows.values("trajectory_index")
    groups = []
    for group_spans, teacher, of_group, reward, (start, end) in columns:
        group_id = of_group["group_id"]
        if numbers[start:end] != list(range(end - start)):
            raise PackError(
                f"{group_id}: its trajectories are numbered {numbers[start:end][:8]}, expected 0 to {end - start - 1}"
            )
        group = Group(
            reward=reward,
            trajectories=tuple(trajectories[start:end]),
            episodes=episodes.build(group_id, group_spans) if episodes is not None else (),
            teacher=teacher,
            **of_group,
        )
        groups.append(group)
    return groups


def _trajectories(
    rows: Rows, vocab_size: int | None, episodes: Sequence[Sequence[episode_columns.EpisodeSpan]]
) -> list[Trajectory]:
    tokens, at = rows.lists("token_ids")
    masks, mask_at = rows.lists("loss_mask")
    logprobs, logprobs_at = rows.lists("behaviour_logprobs")
    runs, runs_at = rows.lists("version_runs")
    if not at == mask_at == logprobs_at:
        raise PackError("token_ids, loss_mask and behaviour_logprobs have lists of different lengths")
    check_token_values(tokens, logprobs, vocab_size)
    sharing = episode_columns.Sharing.of(rows, episodes, [b - a for a, b in itertools.pairwise(at)])
    numbers = runs.tolist()
    stored = [tokens[a:b] for a, b in itertools.pairwise(at)]
    whole: list[np.ndarray] = []
    texts, reasons = rows.values("completion_text"), rows.values("finish_reason")
    baselines = rows.values("is_baseline") if rows.has("is_baseline") else [False] * len(texts)
    experts = optional_columns.experts_of_rows(rows, sharing.totals, sharing.parents)
    images = optional_columns.images_of_rows(rows)
    trajectories = []
    for i, text in enumerate(texts):
        span = slice(at[i], at[i + 1])
        threes = iter(numbers[runs_at[i] : runs_at[i + 1]])
        whole.append(sharing.restore(stored, whole, i))
        trajectories.append(
            Trajectory.of_checked_values(
                whole[i],
                sharing.context(masks[span], i),
                sharing.context(logprobs[span], i),
                tuple([VersionRun(PolicyVersion(v), s, e) for v, s, e in zip(threes, threes, threes, strict=True)]),
                reasons[i],
                text,
                baselines[i],
                experts=experts[i],
                images=images[i],
            )
        )
    return trajectories
