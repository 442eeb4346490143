"""Manifests, layouts and adapter configurations that lie are refused when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.protocol.weights.published_weights import ADAPTER, LAYOUT, PublishedWeights, random_state

from penstock.protocol.errors import MalformedFact, MalformedWeights
from penstock.protocol.weights.adapter_format import AdapterConfig
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import VersionManifest

Edit = Callable[[dict[str, Any]], object]
BLOB = {"key": "k", "size_bytes": 1, "sha256": "0" * 64}


def named(*names: str) -> Edit:
    return lambda m: m.update(model_files=[{"name": name, "blob": BLOB} for name in names])


def stored(**values: object) -> Edit:
    return lambda m: m["buckets"][0]["stored"].update(values)


def as_patch(content: dict[str, Any]) -> None:
    parent = {"version": 0, "manifest": BLOB, "state_root": content["state_root"]}
    content.update(version=1, kind="patch", parent=parent, anchor={**parent, "num_bytes": 1})


@pytest.mark.parametrize(
    "edit",
    [
        *(pytest.param(named(name), id=f"file {name!r}") for name in (
            "../x", "a/b", "/etc/passwd", ".ssh", "", "a\0b", "a\n", "model-00001-of-00002.safetensors",
            "model.safetensors.index.json", "pytorch_model.bin", "x.pt", "x.pkl", "x.BIN", "X.Safetensors", "modeling_evil.py", "tool.PY",
            "x.pyc", "x.so", "x.ckpt", "x.gguf", "x.h5", "x.msgpack", "x.onnx", "x.pickle", "x.joblib", "x.npz", "x.zip", "x.sh", "x.json.py",
        )),
        pytest.param(named("config.json", "config.json"), id="a file twice"),
        pytest.param(named("config.json", "Config.JSON"), id="a file twice where case does not count"),
        pytest.param(stored(object=9), id="an object that is not there"),
        pytest.param(stored(object=-1), id="a negative object"),
        pytest.param(stored(offset=10**12), id="an offset beyond the object"),
        pytest.param(stored(offset=-1), id="a negative offset"),
        pytest.param(stored(size_bytes=2**63), id="a huge range"),
        pytest.param(stored(sha256="xyz"), id="no sha256"),
        pytest.param(lambda m: m["buckets"][0].update(codec="pickle"), id="an unknown codec"),
        pytest.param(lambda m: m["buckets"][0].update(num_changed=10**9), id="more changes than words"),
        pytest.param(lambda m: m["buckets"][0].update(new_xxh3="0"), id="no hash"),
        pytest.param(lambda m: m.update(kind="patch"), id="another kind"),
        pytest.param(as_patch, id="a patch whose buckets are whole"),
        pytest.param(lambda m: m.update(version=-1), id="a negative version"),
        pytest.param(lambda m: m.update(run_id="../x"), id="a run id with .."),
        pytest.param(lambda m: m.update(more=1), id="an unknown field"),
        pytest.param(lambda m: m.update(schema_tag="weights_manifest.v9"), id="another schema"),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(edit: Edit) -> None:
    run = PublishedWeights()
    content = json.loads(run.publish_anchor(random_state(np.random.default_rng(0))).to_json())
    VersionManifest.from_json(json.dumps(content).encode())
    edit(content)
    with pytest.raises(MalformedFact):
        VersionManifest.from_json(json.dumps(content).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"\0" * 9, b"[" * 100_000, b'{"a": ' + b"9" * 9999 + b"}", b"\xff"])
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedFact):
        VersionManifest.from_json(data)
    with pytest.raises(MalformedFact):
        WeightLayout.from_json(data)
    with pytest.raises(MalformedWeights):
        AdapterConfig.from_json(data)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda b: b["tensors"][0].update(shape=[2**40, 2**40]), id="a huge shape"),
        pytest.param(lambda b: b["tensors"][0].update(shape=[-1]), id="a negative shape"),
        pytest.param(
            lambda b: b["tensors"][0].update(shape=[1] * 1000 + b["tensors"][0]["shape"]), id="a thousand dimensions"
        ),
        pytest.param(lambda b: b["tensors"][0].update(byte_offset=8), id="a gap"),
        pytest.param(lambda b: b["tensors"][0].update(num_bytes=1), id="another size"),
        pytest.param(lambda b: b["tensors"][0].update(name="a\0b"), id="NUL in a name"),
        pytest.param(lambda b: b["tensors"].append(b["tensors"][0]), id="a tensor twice"),
        pytest.param(lambda b: b.update(dtype="object"), id="an unknown dtype"),
        pytest.param(lambda b: b.update(tensors=[]), id="an empty bucket"),
    ],
)
def test_a_layout_that_lies_is_refused(edit: Edit) -> None:
    content = json.loads(LAYOUT.to_json())
    edit(content["buckets"][0])
    with pytest.raises(MalformedFact):
        WeightLayout.from_json(json.dumps(content).encode())


@pytest.mark.parametrize(
    "values", [{"r": 0}, {"r": 2**30}, {"lora_alpha": 1e99}, {"lora_alpha": -1}, {"target_modules": []}]
)
def test_an_adapter_configuration_that_lies_is_refused(values: dict[str, object]) -> None:
    content = json.loads(ADAPTER.to_json()) | values
    with pytest.raises(MalformedWeights):
        AdapterConfig.from_json(json.dumps(content).encode())
