"""The layout of tensors in buckets: the same for everybody, and a bucket is a file that engines load."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save
from tests.examples import examples
from tests.safetensors_digests import safetensors_digests

from penstock.protocol.weights import layout as weight_layout
from penstock.protocol.weights.layout import TensorSpec, WeightLayout, build_layout, weights_digest

SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.text("abc.", min_size=1, max_size=6),
        st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@given(SPECS, st.randoms(), st.integers(1, 400))
@examples(40)
def test_everybody_computes_the_same_layout(specs: list[TensorSpec], random, bucket_bytes: int):
    """The order of the tensors does not matter, each is in one bucket of its dtype, and JSON round-trips."""
    layout = build_layout(specs, bucket_bytes=bucket_bytes)
    shuffled = list(specs)
    random.shuffle(shuffled)
    assert build_layout(shuffled, bucket_bytes=bucket_bytes).layout_id == layout.layout_id
    assert {(t.name, b.dtype, t.shape) for _, b, t in layout.placed()} == set(specs)
    assert all(b.num_bytes <= bucket_bytes or len(b.tensors) == 1 or b.num_bytes == 0 for b in layout.buckets)
    assert WeightLayout.from_json(layout.to_json()) == layout


def test_a_layout_changes_its_name_with_anything_in_it():
    """Shape, dtype, name, bucket size and ties are all part of the id."""
    specs = [TensorSpec("a", "bfloat16", (4, 2)), TensorSpec("b", "bfloat16", (8,))]
    others = [
        build_layout(specs, bucket_bytes=16),
        build_layout(specs, tied={"c": "a"}),
        build_layout([specs[0]._replace(shape=(2, 4)), specs[1]]),
        build_layout([specs[0]._replace(dtype="float16"), specs[1]]),
        build_layout([specs[0]._replace(name="z"), specs[1]]),
    ]
    assert len({build_layout(specs).layout_id, *(layout.layout_id for layout in others)}) == 6


def test_a_bucket_behind_its_header_is_the_safetensors_file():
    """The library reads it, writes its data in the same order, and the digest of the file is that of the bucket."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.random((3, size)).astype(np.float32) for name, size in (("z.w", 5), ("a", 1), ("é", 7))}
    layout = build_layout([TensorSpec(name, "float32", array.shape) for name, array in tensors.items()])
    (bucket,) = layout.buckets
    raw = b"".join(tensors[placed.name].tobytes() for placed in bucket.tensors)
    header = weight_layout.shard_header(bucket)
    loaded = load(header + raw)
    assert len(header) % 64 == 0
    assert loaded.keys() == tensors.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in tensors.items())
    assert save(tensors).endswith(raw)
    assert weights_digest(safetensors_digests(header + raw)) == weights_digest(
        weight_layout.bucket_digests(bucket, memoryview(raw))
    )
    with pytest.raises(ValueError, match="has 156 bytes, got 155"):
        weight_layout.bucket_digests(bucket, memoryview(raw[1:]))


def test_a_folder_of_buckets_has_an_index():
    layout = build_layout([TensorSpec("a", "bfloat16", (4,)), TensorSpec("b", "float32", (2,))])
    index = json.loads(weight_layout.shard_index(layout))
    assert index["weight_map"] == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert index["metadata"]["total_size"] == layout.num_bytes == 16


def test_tied_tensors_are_stored_once():
    spec = TensorSpec("embed", "bfloat16", (4,))
    assert build_layout([spec], tied={"lm_head": "embed"}).num_words == 4
    for tied in ({"embed": "embed"}, {"lm_head": "missing"}):
        with pytest.raises(ValueError, match="tied tensor"):
            build_layout([spec], tied=tied)
    with pytest.raises(ValueError, match="placed twice"):
        build_layout([spec, spec])
    with pytest.raises(ValueError, match="int4"):
        build_layout([spec._replace(dtype="int4")])
