"""Packs of groups: groups round-trip unchanged, and damage is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.examples import examples

from penstock.protocol.errors import PackError
from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun


def _runs(versions: list[int], start: int) -> tuple[VersionRun, ...]:
    """Return the runs of one version per token, the first token at ``start``."""
    ends = itertools.accumulate((len(list(same)) for _, same in itertools.groupby(versions)), initial=start)
    spans = itertools.pairwise(ends)
    return tuple(
        VersionRun(PolicyVersion(version), begin, end)
        for (version, _), (begin, end) in zip(itertools.groupby(versions), spans, strict=True)
    )


@st.composite
def trajectories(draw: st.DrawFn, prompt: int) -> Trajectory:
    """Draw a trajectory of ``prompt`` given tokens and some sampled ones, by up to three versions."""
    sampled = draw(st.integers(1, 12))
    length = prompt + sampled
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=sampled, max_size=sampled))
    versions = sorted(draw(st.lists(st.integers(0, 3), min_size=sampled, max_size=sampled)))
    return Trajectory(
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=np.arange(length) >= prompt,
        behaviour_logprobs=np.concatenate([np.zeros(prompt, np.float32), np.array(logprobs, np.float32)]),
        version_runs=_runs(versions, prompt),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        completion_text=draw(st.text(max_size=20)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt = draw(st.integers(1, 6))
    return Group(
        group_id=f"e0.p{draw(st.integers(0, 10**6))}.a0",
        split=draw(st.sampled_from(["train", "eval"])),
        attempt=draw(st.integers(0, 3)),
        issued_version=draw(st.integers(0, 1000)),
        prompt_text=draw(st.text(max_size=20)),
        num_prompt_tokens=prompt,
        reward=RewardRequest(name="exact_match", data_source=draw(st.text(max_size=5)), ground_truth=None),
        trajectories=tuple(draw(st.lists(trajectories(prompt), min_size=1, max_size=4))),
    )


def _same(a: Group, b: Group) -> bool:
    scalars = all(
        getattr(a, name) == getattr(b, name)
        for name in ("group_id", "split", "attempt", "issued_version", "prompt_text", "num_prompt_tokens", "reward")
    )
    rows = zip(a.trajectories, b.trajectories, strict=True)
    return scalars and all(
        np.array_equal(x.token_ids, y.token_ids)
        and np.array_equal(x.loss_mask, y.loss_mask)
        and np.array_equal(x.behaviour_logprobs, y.behaviour_logprobs)
        and (x.version_runs, x.finish_reason, x.completion_text) == (y.version_runs, y.finish_reason, y.completion_text)
        and x.is_baseline is y.is_baseline
        and (y.token_ids.dtype, y.loss_mask.dtype, y.behaviour_logprobs.dtype) == (np.int32, np.bool_, np.float32)
        for x, y in rows
    )


@given(st.lists(groups(), min_size=1, max_size=5), st.data())
@examples(60)
def test_a_pack_round_trips(packed: list[Group], data: st.DataObject):
    """Every group is read back equal, all together or by its row group; texts can be read without tokens."""
    stored = group_pack.encode(packed)
    assert all(_same(a, b) for a, b in zip(packed, group_pack.decode(stored), strict=True))
    wanted = data.draw(st.lists(st.integers(0, len(packed) - 1), min_size=1, max_size=4))
    assert all(_same(packed[n], b) for n, b in zip(wanted, group_pack.decode(stored, wanted), strict=True))
    for number, texts in zip(wanted, group_pack.decode_texts(stored, wanted), strict=True):
        assert texts.completions == tuple(t.completion_text for t in packed[number].trajectories)
        assert texts.reward == packed[number].reward


def test_the_baseline_is_the_last_trajectory_and_is_stored():
    group = _group()
    marked = replace(group.trajectories[-1], is_baseline=True)
    with_baseline = replace(group, trajectories=(*group.trajectories[:-1], marked))
    [back] = group_pack.decode(group_pack.encode([with_baseline]))
    assert [row.is_baseline for row in back.trajectories] == [False, True]
    assert (back.summary(0).has_baseline, back.summary(0).num_trained) == (True, 1)
    with pytest.raises(PackError, match="a baseline is not the last trajectory"):
        replace(group, trajectories=(marked, *group.trajectories))
    with pytest.raises(ValidationError, match="no trajectory but a baseline"):
        replace(group, trajectories=(marked,)).summary(0)


def test_a_pack_from_before_there_were_baselines_is_readable():
    table = pq.read_table(pa.BufferReader(group_pack.encode([_group()]))).drop_columns(["is_baseline"])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    [group] = group_pack.decode(sink.getvalue().to_pybytes())
    assert [row.is_baseline for row in group.trajectories] == [False, False]


def test_a_pack_of_the_first_writers_is_readable():
    """Lists that might hold nulls, zstd and a dictionary for every text: as packs were written until they got cheaper."""
    table = pq.read_table(pa.BufferReader(group_pack.encode([_group(), _group()])))
    fields = [
        pa.field(f.name, pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type) for f in table.schema
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(pa.schema(fields, table.schema.metadata)), sink, compression="zstd", row_group_size=2)
    assert all(_same(_group(), group) for group in group_pack.decode(sink.getvalue().to_pybytes()))


def test_long_groups_are_compressed_harder():
    """Of a group of thousands of tokens the ids are stored with zstd and byte by byte, of a tiny one with LZ4."""
    for length, codec, encoding in ((30, "LZ4", "PLAIN"), (20_000, "ZSTD", "BYTE_STREAM_SPLIT")):
        [group] = group_pack.decode(group_pack.encode([_group(length)]))
        assert _same(group, _group(length))
        file = pq.ParquetFile(pa.BufferReader(group_pack.encode([group])))
        token_ids = file.metadata.row_group(0).column(6)
        assert (token_ids.path_in_schema, token_ids.compression) == ("token_ids.list.element", codec)
        assert encoding in token_ids.encodings


@given(st.data())
@examples(60)
def test_a_damaged_pack_is_a_pack_error_or_still_readable(data: st.DataObject):
    """Flipped and missing bytes never escape as anything but PackError."""
    stored = bytearray(group_pack.encode([_group(), _group()]))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(stored) - 1)))
    for read in (group_pack.decode, lambda b: group_pack.decode_texts(b, [0])):
        with contextlib.suppress(PackError):
            read(bytes(stored[:cut]))


def test_another_parquet_file_is_refused():
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}), sink)
    with pytest.raises(PackError, match=r"expected schema group_pack\.v1, got none"):
        group_pack.decode(sink.getvalue())
    with pytest.raises(PackError, match=r"row group 7 of a pack that has 1"):
        group_pack.decode(group_pack.encode([_group()]), [7])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"loss_mask": np.ones(3, bool)}, "per-token arrays differ"),
        ({"behaviour_logprobs": np.full(30, np.nan, np.float32)}, "NaN"),
        ({"version_runs": ()}, "do not cover"),
        ({"version_runs": (VersionRun(4, 21, 31),)}, "do not cover"),
    ],
)
def test_an_inconsistent_trajectory_cannot_be_built(change: dict, complaint: str):
    """Arrays of different lengths, NaN log-probabilities and uncovered tokens are refused on construction."""
    fields = {name: getattr(_group().trajectories[0], name) for name in Trajectory.__slots__}
    with pytest.raises(PackError, match=complaint):
        Trajectory(**{**fields, **change})


@pytest.mark.parametrize("change", [{"attempt": 2**53}, {"issued_version": 2**64}, {"num_prompt_tokens": 2**31}])
def test_numbers_beyond_their_column_are_a_pack_error(change: dict):
    """A task may state an attempt that no column holds; a worker that stores its group gets a PackError."""
    with pytest.raises(PackError, match=r"e0\.p1\.a0 and 0 more do not fit group_pack\.v1"):
        group_pack.encode([dataclasses.replace(_group(), **change)])


def _group(length: int = 30, prompt: int = 21) -> Group:
    row = Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) >= prompt,
        behaviour_logprobs=np.zeros(length, np.float32),
        version_runs=(VersionRun(4, prompt, length),),
        finish_reason="stop",
        completion_text="12345678",
    )
    return Group(
        group_id="e0.p1.a0",
        split="train",
        attempt=0,
        issued_version=4,
        prompt_text="sort 87654321",
        num_prompt_tokens=prompt,
        reward=RewardRequest(name="exact_match", ground_truth='"12345678"'),
        trajectories=(row, row),
    )
