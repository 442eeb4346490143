"""Packs that no worker of ours writes, by name: wrong schemas, pages, sizes, values, contradictions of a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.groups import make_group
from tests.protocol.packs.written_packs import table_of, task_of, written

from penstock.protocol.groups import AbandonedCompletion, GeneratedGroup, Sampling, Task
from penstock.protocol.packs import group_pack
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.trajectory import Group

SIZE = 3
VOCABULARY = 200
GROUP_ID = "e0.p7.a0"
Columns = dict[str, Any]


def honest_group() -> Group:
    return make_group(GROUP_ID, size=SIZE, version=2, prompt_ids=(5, 6, 7, 8), seed=3)


def honest_task() -> Task:
    return task_of(honest_group(), sampling=Sampling(max_new_tokens=16))


@dataclass(frozen=True, slots=True)
class Hostile:
    """Bytes of a pack, the message that describes it, and the task that asked for it."""

    data: bytes
    described: GeneratedGroup
    promise: TaskPromise

    def read(self) -> Group:
        [group] = group_pack.decode(
            self.data, [self.described.row_group], described=[self.described], vocab_size=VOCABULARY
        )
        self.promise.check(group)
        stated = self.described
        self.promise.check_lengths(
            stated.group_id, stated.completion_tokens, stated.has_baseline, len(stated.abandoned)
        )
        return group

    def read_texts(self) -> group_pack.GroupTexts:
        """Read it as the reward service does; raises PackError."""
        [texts] = group_pack.decode_texts(self.data, [self.described.row_group], described=[self.described])
        return texts


def honest() -> Hostile:
    group = honest_group()
    return Hostile(group_pack.encode([group]), group.summary(0), TaskPromise.of(honest_task()))


def _table() -> pa.Table:
    return table_of(honest_group())


def _stored(table: pa.Table, **options: Any) -> Hostile:
    """Write any table as a pack with the right tag, described as the honest one is."""
    return replace(honest(), data=written(table, **options))


def _with_column(name: str, values: pa.Array, *, nullable: bool = False) -> Hostile:
    table = _table()
    field = pa.field(name, values.type, nullable=nullable)
    return _stored(table.set_column(table.schema.get_field_index(name), field, values))


def _with_type(name: str, kind: pa.DataType, value: Any) -> Hostile:
    return _with_column(name, pa.array([value] * SIZE, kind))


def _with_values(change: Callable[[Columns], None]) -> Hostile:
    columns = _table().to_pydict()
    change(columns)
    return _stored(pa.table(columns, schema=group_pack.SCHEMA))


def _set(name: str, *values: Any) -> Hostile:
    return _with_values(lambda columns: columns.update({name: [*values, *columns[name][len(values) :]]}))


def _sample_nothing(columns: Columns) -> None:
    length = len(columns["token_ids"][0])
    columns["loss_mask"][0], columns["behaviour_logprobs"][0] = [False] * length, [0.0] * length
    columns["version_runs"][0] = []


def _half_twice(columns: Columns) -> None:
    """Runs of the first trajectory name half of its tokens twice; the others are certain: nothing else shows it."""
    columns["version_runs"][0] = [2, 4, 9, 2, 4, 9]
    columns["behaviour_logprobs"][0] = [*columns["behaviour_logprobs"][0][:9], *[0.0] * 5]


def _set_token(name: str, place: int, value: Any) -> Hostile:
    def change(columns: Columns) -> None:
        columns[name][1] = [*columns[name][1]]
        columns[name][1][place] = value

    return _with_values(change)


def _prompt_of(num_tokens: int) -> Hostile:
    """Pack and message agree on a prompt of another length than it has."""
    hostile = _set("num_prompt_tokens", *[num_tokens] * SIZE)
    return replace(hostile, described=hostile.described.model_copy(update={"prompt_tokens": num_tokens}))


ABANDONED = AbandonedCompletion(reason="aborted", num_tokens=3)


def _described(**fields: Any) -> Hostile:
    good = honest()
    return replace(good, described=good.described.model_copy(update=fields))


def _asked(**fields: Any) -> Hostile:
    return replace(honest(), promise=TaskPromise.of(honest_task().model_copy(update=fields)))


def _group_of(change: Callable[[Group], Group]) -> Hostile:
    """A pack and a message that agree with each other, of another group than the task asked for."""
    group = change(honest_group())
    return replace(honest(), data=group_pack.encode([group]), described=group.summary(0))


def _patched(old: bytes, new: bytes, count: int = 1) -> Hostile:
    good = honest()
    assert old in good.data
    return replace(good, data=good.data.replace(old, new, count))


def _bomb(rows: int, tokens: int, **options: Any) -> Hostile:
    """A valid Parquet file of few bytes that decodes to many."""
    table = _table().slice(0, 1)
    zeros = pa.array(np.zeros(tokens, np.int32))
    for name, values in (
        ("token_ids", zeros), ("loss_mask", zeros.cast(pa.bool_())), ("behaviour_logprobs", zeros.cast(pa.float32())),
    ):  # fmt: skip
        kind = group_pack.SCHEMA.field(name).type
        column = pa.ListArray.from_arrays(pa.array([0, tokens], pa.int32()), values, type=kind)
        table = table.set_column(table.schema.get_field_index(name), group_pack.SCHEMA.field(name), column)
    return _stored(pa.concat_tables([table] * rows), **options)


def _dictionary_bomb() -> Hostile:
    """One text of 2 MB in a dictionary, used by every row."""
    table = pa.concat_tables([_table()] * 14)
    text = pa.array(["x" * 2**21] * len(table), pa.string())
    field = group_pack.SCHEMA.field("completion_text")
    table = table.set_column(table.schema.get_field_index("completion_text"), field, text)
    return replace(
        _stored(table, compression="zstd", use_dictionary=True),
        described=honest().described.model_copy(
            update={"completion_tokens": (1,) * len(table), "finish_reasons": ("stop",) * len(table)}
        ),
    )


def _page_claims(name: str, *, num_values: int) -> Hostile:
    """The header of a column's first page says another number of values than the footer."""
    good = honest()
    chunk = _chunk(good.data, name)
    at = chunk.data_page_offset
    was = _varint(chunk.num_values)
    place = good.data.index(b"\x2c\x15" + was, at) + 2
    data = good.data[:place] + _varint(num_values, len(was)) + good.data[place + len(was) :]
    return replace(good, data=data)


def _page_bytes(name: str, offset: int, value: int) -> Hostile:
    good = honest()
    at = _chunk(good.data, name).data_page_offset + offset
    return replace(good, data=good.data[:at] + bytes([value]) + good.data[at + 1 :])


def _chunk(data: bytes, name: str) -> pq.ColumnChunkMetaData:
    row_group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    chunks = (row_group.column(i) for i in range(row_group.num_columns))
    return next(chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == name)


def _varint(number: int, length: int = 0) -> bytes:
    number, found = number << 1, bytearray()
    while number or not found:
        found.append((number & 0x7F) | 0x80)
        number >>= 7
    found += b"\x80" * (length - len(found))
    found[-1] &= 0x7F
    return bytes(found)


def _footer(size: int) -> Hostile:
    good = honest()
    return replace(good, data=good.data[:-8] + size.to_bytes(4, "little") + b"PAR1")


def _wide_schema() -> Hostile:
    table = _table()
    for number in range(100):
        table = table.append_column(f"more_{number}", pa.array([0] * SIZE, pa.int32()))
    return _stored(table)


def _moved_mask() -> Hostile:
    masks = _table().to_pydict()["loss_mask"]
    masks[1][0], masks[1][-1] = True, False
    return _set("loss_mask", *masks)


def _with_prompt(group: Group) -> Group:
    rows = []
    for row in group.trajectories:
        tokens = row.token_ids.copy()
        tokens[0] = 9
        rows.append(replace(row, token_ids=tokens))
    return replace(group, trajectories=tuple(rows))


def _with_reward(**fields: Any) -> Callable[[Group], Group]:
    return lambda group: replace(group, reward=group.reward.model_copy(update=fields))


STRUCT = pa.struct([pa.field("element", pa.int32(), nullable=False)])
LIST_OF_STRUCTS = pa.list_(pa.field("element", STRUCT, nullable=False))

# Hostile packs by name; `TRAINER_ONLY` are those that show only in columns which the reward service does not read, or
# against a task, which it does not know.
_OF_BOTH: dict[str, Callable[[], Hostile]] = {
    # schema
    "token ids are a struct": lambda: _with_type("token_ids", STRUCT, {"element": 1}),
    "token ids are lists of structs": lambda: _with_type("token_ids", LIST_OF_STRUCTS, [{"element": 1}]),
    "token ids are uint32": lambda: _with_type("token_ids", pa.list_(pa.uint32()), [1, 2]),
    "the completion is a timestamp": lambda: _with_type("completion_text", pa.timestamp("us"), 0),
    "token ids are one number": lambda: _with_type("token_ids", pa.int32(), 1),
    "token ids are int64": lambda: _with_type("token_ids", pa.list_(pa.int64()), [1, 2]),
    "token ids are floats": lambda: _with_type("token_ids", pa.list_(pa.float32()), [1.0]),
    "token ids are text": lambda: _with_type("token_ids", pa.string(), "1 2 3"),
    "log-probabilities are doubles": lambda: _with_type("behaviour_logprobs", pa.list_(pa.float64()), [-1.0]),
    "the mask is of integers": lambda: _with_type("loss_mask", pa.list_(pa.int8()), [1, 1]),
    "the group id is binary": lambda: _with_type("group_id", pa.binary(), b"\xff\xfe"),
    "a column is missing": lambda: _stored(_table().drop_columns(["completion_text"])),
    "a column too many": lambda: _stored(_table().append_column("extra", pa.array([0] * SIZE))),
    "a column twice": lambda: _stored(_table().append_column("token_ids", _table().column("token_ids"))),
    "columns in another order": lambda: _stored(_table().select(sorted(group_pack.SCHEMA.names))),
    "a hundred columns more": _wide_schema,
    "another tag": lambda: _patched(b"group_pack.v1", b"group_pack.v9", count=2),
    "an Arrow schema with dictionaries": lambda: _stored(
        _table().set_column(
            0,
            pa.field("group_id", pa.dictionary(pa.int32(), pa.string()), nullable=False),
            _table().column("group_id").dictionary_encode(),
        ),
        store_schema=True,
    ),
    # footer and pages
    "no bytes": lambda: replace(honest(), data=b""),
    "not Parquet": lambda: replace(honest(), data=b"PAR1" + b"\x00" * 40 + b"PAR1"),
    "half a file": lambda: replace(honest(), data=honest().data[: len(honest().data) // 2]),
    "a footer larger than the file": lambda: _footer(2**31),
    "a footer of no bytes": lambda: _footer(0),
    "a text in a dictionary": _dictionary_bomb,
    "a page of another type": lambda: _page_bytes("prompt_text", 1, 6),
    "a page with another encoding": lambda: _page_bytes("reward_name", 10, 12),
    "delta encoded texts": lambda: _stored(_table(), column_encoding={"completion_text": "DELTA_BYTE_ARRAY"}),
    "pages of version 2": lambda: _stored(_table(), data_page_version="2.0"),
    "page checksums": lambda: _stored(_table(), write_page_checksum=True),
    # rows
    "fewer rows than described": lambda: _stored(_table().slice(0, 2)),
    "more rows than described": lambda: _stored(pa.concat_tables([_table(), _table()])),
    "rows of two groups": lambda: _set("group_id", GROUP_ID, "e0.p8.a0"),
    "rows of two prompts": lambda: _set("prompt_text", "one", "two"),
    "rows of two truths": lambda: _set("ground_truth", '"a"', '"b"'),
    "a truth that is no JSON": lambda: _set("ground_truth", *["{"] * SIZE),
    "a reward without a name": lambda: _set("reward_name", *[""] * SIZE),
    "an extra_info nested a million deep": lambda: _set("extra_info", *["[" * 10**6] * SIZE),
    # values
    "a reason to stop that nobody knows": lambda: _set("finish_reason", "bored"),
    # the message
    "described as another group": lambda: _described(group_id="e0.p9.a0"),
    "described as another row group": lambda: _described(row_group=1),
    "described as row group 10^15": lambda: _described(row_group=10**15),
    "described with other reasons": lambda: _described(finish_reasons=("length",) * SIZE),
    "described with another reward": lambda: _described(reward_name="math"),
}
TRAINER_ONLY: dict[str, Callable[[], Hostile]] = {
    # footer and pages
    "zeros of 90 MB in 2 kB": lambda: _bomb(SIZE, 1_000_000, compression="zstd"),
    "zeros without compression levels": lambda: _bomb(SIZE, 1_000_000, compression="lz4"),
    "tokens in a dictionary of one entry": lambda: _bomb(SIZE, 1_200_000, compression="zstd", use_dictionary=True),
    "a page of a list claims more values": lambda: _page_claims("token_ids", num_values=60),
    "delta encodings": lambda: _stored(_table(), column_encoding={"attempt": "DELTA_BINARY_PACKED"}),
    # rows
    "rows numbered twice": lambda: _set("trajectory_index", 0, 0, 2),
    # values
    "a negative token id": lambda: _set_token("token_ids", -1, -1),
    "a token id beyond the vocabulary": lambda: _set_token("token_ids", -1, VOCABULARY),
    "a log-probability of NaN": lambda: _set_token("behaviour_logprobs", -1, float("nan")),
    "a log-probability of infinity": lambda: _set_token("behaviour_logprobs", -1, float("inf")),
    "a log-probability of minus infinity": lambda: _set_token("behaviour_logprobs", -1, float("-inf")),
    "a log-probability above 0": lambda: _set_token("behaviour_logprobs", -1, 0.5),
    "a log-probability of -1e30": lambda: _set_token("behaviour_logprobs", -1, -1e30),
    "a log-probability of a token that float32 never draws": lambda: _set_token("behaviour_logprobs", -1, -104.5),
    "a log-probability of a prompt token": lambda: _set_token("behaviour_logprobs", 0, -1.0),
    "a mask that takes a prompt token in": lambda: _set_token("loss_mask", 0, True),
    "a mask of another token than the sampled one": _moved_mask,
    "a mask that leaves a sampled token out": lambda: _set_token("loss_mask", -1, False),
    "no version run and no sampled token": lambda: _with_values(_sample_nothing),
    "arrays of different lengths": lambda: _set("loss_mask", [True]),
    "no version run": lambda: _set("version_runs", *[[]] * SIZE),
    "half a version run": lambda: _set("version_runs", [2, 4]),
    "version runs that name tokens twice": lambda: _set("version_runs", [2, 4, 9, 2, 9, 14], [2, 4, 7, 2, 4, 7]),
    "version runs that name half of the tokens twice": lambda: _with_values(_half_twice),
    "version runs that overlap": lambda: _set_token("version_runs", 1, 3),
    "a version run beyond the end": lambda: _set_token("version_runs", 2, 10**12),
    "a version run that ends before it starts": lambda: _set_token("version_runs", 2, -1),
    "a negative version": lambda: _set_token("version_runs", 0, -5),
    "another version than described": lambda: _set_token("version_runs", 0, 1),
    "a version of the future": lambda: _set_token("version_runs", 0, 2**62),
    "two baselines": lambda: _set("is_baseline", True, True, True),
    "a baseline that is not the last": lambda: _set("is_baseline", True),
    "a trajectory with another prompt": lambda: _set_token("token_ids", 1, 50),
    "a split that does not exist": lambda: _set("split", *["test"] * SIZE),
    "no prompt": lambda: _prompt_of(0),
    "a prompt that was sampled": lambda: _prompt_of(5),
    "a prompt longer than the trajectory": lambda: _prompt_of(500),
    # the message
    "described with other lengths": lambda: _described(completion_tokens=(1, 2, 3)),
    "described with a baseline": lambda: _described(has_baseline=True),
    "described with other versions": lambda: _described(oldest_version=0),
    "described as issued for another version": lambda: _described(issued_version=0),
    "described as another attempt": lambda: _described(attempt=3),
    # the task
    "one trajectory instead of the group": lambda: _group_of(lambda g: replace(g, trajectories=g.trajectories[:1])),
    "another prompt than the task's": lambda: _group_of(_with_prompt),
    "the prompt's text is another": lambda: _group_of(lambda g: replace(g, prompt_text="say 1 2 3")),
    "a truth that the task did not give": lambda: _group_of(_with_reward(ground_truth='"abc"')),
    "no truth": lambda: _group_of(_with_reward(ground_truth=None)),
    "another reward than the task's": lambda: _group_of(_with_reward(name="auto")),
    "another data source than the task's": lambda: _group_of(_with_reward(data_source="easy")),
    "other extra_info than the task's": lambda: _group_of(_with_reward(extra_info='{"bonus": 1}')),
    "another split than the task's": lambda: _group_of(lambda g: replace(g, split="eval")),
    "another attempt than the task's": lambda: _group_of(lambda g: replace(g, attempt=4)),
    "more tokens than the task allows": lambda: _asked(
        sampling=honest_task().sampling.model_copy(update={"max_new_tokens": 2})
    ),
    "described with a completion that was never started": lambda: _described(abandoned=(ABANDONED,)),
    "described without one that was started": lambda: _asked(redundant_completions=2),
    "more completions than are kept": lambda: _asked(
        group_size=SIZE - 1, redundant_completions=1
    ),  # one more than enough, and the rest is aborted at once
    "a larger group was asked for": lambda: _asked(group_size=SIZE + 1),
}
HOSTILE = _OF_BOTH | TRAINER_ONLY
