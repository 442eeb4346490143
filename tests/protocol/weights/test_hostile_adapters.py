"""A published adapter that lies, with every hash right, is refused before it is a folder that an engine loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.protocol.weights.published_weights import ADAPTER, ADAPTER_LAYOUT, LAYOUT, PublishedWeights

from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, adapter_digest
from penstock.protocol.weights.export import export_adapter, export_version
from penstock.protocol.weights.layout import Bucket, PlacedTensor, TensorDigest, shard_header, tensor_digest
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader

DOWN, UP = (tensor["name"] for tensor in json.loads(ADAPTER_LAYOUT.to_json())["buckets"][0]["tensors"])
HUGE = 2**45  # bytes that no machine has


@dataclass
class Forgery:
    """What the attacker publishes: its layout's one bucket, raw bytes, configuration, and the rest of the manifest."""

    bucket: dict[str, Any] = field(default_factory=lambda: json.loads(ADAPTER_LAYOUT.to_json())["buckets"][0])
    raw: bytes = b""
    config: bytes = ADAPTER.to_json()
    header: bytes | None = None  # None: that of the layout
    manifest: dict[str, Any] = field(default_factory=dict)
    size_of_config: int | None = None

    def tensors(self, *shapes: tuple[str, tuple[int, ...]], word_bytes: int = 2) -> None:
        """Place tensors one after another, and fill them with zeros where they fit in memory."""
        offset, placed = 0, []
        for name, shape in shapes:
            size = int(np.prod(np.array(shape, dtype=object))) * word_bytes
            placed.append({"name": name, "shape": list(shape), "byte_offset": offset, "num_bytes": size})
            offset += size
        self.bucket["tensors"] = placed
        self.raw = bytes(offset) if offset < 10**6 else b""


def set_raw(forgery: Forgery, words: int) -> None:
    forgery.raw = np.full(ADAPTER_LAYOUT.num_words, words, np.uint16).tobytes()


def set_config(**values: object) -> Callable[[Forgery], None]:
    def edit(forgery: Forgery) -> None:
        forgery.config = json.dumps(json.loads(ADAPTER.to_json()) | values).encode()

    return edit


def twice(forgery: Forgery) -> None:
    forgery.config = ADAPTER.to_json().replace(b'"r": 2', b'"r": 2, "r": 2')


def header(data: bytes) -> Callable[[Forgery], None]:
    return lambda forgery: setattr(forgery, "header", len(data).to_bytes(8, "little") + data)


def as_float8(forgery: Forgery) -> None:
    forgery.bucket["dtype"] = "float8_e4m3fn"
    forgery.tensors((DOWN, (2, 8)), (UP, (50, 2)), word_bytes=1)


FORGERIES: dict[str, Callable[[Forgery], Any]] = {
    "NaN": lambda f: set_raw(f, 0x7FC0),
    "infinity": lambda f: set_raw(f, 0x7F80),
    "minus infinity": lambda f: set_raw(f, 0xFF80),
    "another rank": lambda f: f.tensors((DOWN, (3, 8)), (UP, (50, 3))),
    "a wrong width": lambda f: f.tensors((DOWN, (2, 9)), (UP, (50, 2))),
    "a wrong height": lambda f: f.tensors((DOWN, (2, 8)), (UP, (49, 2))),
    "transposed": lambda f: f.tensors((DOWN, (8, 2)), (UP, (2, 50))),
    "three dimensions": lambda f: f.tensors((DOWN, (2, 8, 1)), (UP, (50, 2, 1))),
    "no values in a huge shape": lambda f: f.tensors((DOWN, (0, 2**52, 2**52)), (UP, (50, 2))),
    "a scalar": lambda f: f.tensors((DOWN, ()), (UP, ())),
    "a thousand dimensions": lambda f: f.tensors((DOWN, (1,) * 1000), (UP, (50, 2))),
    "half a pair": lambda f: f.tensors((DOWN, (2, 8))),
    "an unknown tensor": lambda f: f.tensors((DOWN, (2, 8)), (UP, (50, 2)), ("base_model.model.lm_head.weight", (1,))),
    "a weight of no layer": lambda f: f.tensors(
        ("base_model.model.x.lora_A.weight", (2, 8)), ("base_model.model.x.lora_B.weight", (50, 2))
    ),
    "a name with ..": lambda f: f.tensors(
        ("base_model.model.../../x.lora_A.weight", (2, 8)), ("base_model.model.../../x.lora_B.weight", (50, 2))
    ),
    "more bytes than are stored": lambda f: f.tensors((DOWN, (2, HUGE)), (UP, (50, 2))),
    "a dtype that is not merged": as_float8,
    "a header with overlapping offsets": header(
        json.dumps({n: {"dtype": "BF16", "shape": [2, 8], "data_offsets": [0, 32]} for n in (DOWN, UP)}).encode()
    ),
    "a huge length of the header": lambda f: setattr(f, "header", (2**63).to_bytes(8, "little") + b"{}"),
    "a header with other names": header(b'{"../x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'),
    "no header": lambda f: setattr(f, "header", b""),
    "a base of another root": lambda f: f.manifest.update(base_root="1" * 64),
    "a base of another version": lambda f: f.manifest.update(base_version=7, version=8),
    "a version that is no newer": lambda f: f.manifest.update(version=0),
    "another run": lambda f: f.manifest.update(run_id="r2"),
    "a root that leaves out the base": lambda f: f.manifest.update(state_root="0" * 64),
    "a huge configuration": lambda f: setattr(f, "config", f.config[:-2] + b" " * 10**6 + b"}"),
    "a manifest of a terabyte": lambda f: f.manifest.update(size=10**12),
    "a layout of a terabyte": lambda f: f.manifest.update(size_of_layout=10**12),
    "a configuration of a terabyte": lambda f: setattr(f, "size_of_config", 10**12),
    "a field twice": twice,
    "rank as text": set_config(r="2"),
    "rank as a truth": set_config(r=True),
    "infinite alpha": set_config(lora_alpha=float("inf")),
    "a target that is no text": set_config(target_modules=[1]),
    "deep nesting": lambda f: setattr(f, "config", f.config[:-2] + b', "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "a base to download": set_config(base_model_name_or_path="evil/model"),
    "another scale": set_config(use_rslora=True),
    "ranks by layer": set_config(rank_pattern={"embed": 1}),
    "code": set_config(auto_mapping={"base_model_class": "x", "parent_library": "evil"}),
    "other weights": set_config(modules_to_save=["embed"]),
    "biases": set_config(bias="all"),
    "another method": set_config(peft_type="PREFIX_TUNING"),
}  # fmt: skip


def publish(forgery: Forgery) -> tuple[bytes, PublishedWeights]:
    """Store an adapter whose hashes are all those of what is stored."""
    run = PublishedWeights()
    base = run.publish_anchor([np.zeros(bucket.num_bytes, np.uint8) for bucket in LAYOUT.buckets])
    assert run.anchor is not None
    raw = forgery.raw or bytes(min(ADAPTER_LAYOUT.num_bytes, 10**6))
    layout = json.dumps({"buckets": [forgery.bucket], "tied": {}}).encode()
    head = _header(forgery.bucket) if forgery.header is None else forgery.header
    tensors = [
        TensorDigest(t["name"], "bfloat16", tuple(t["shape"]), _xxh3(raw[t["byte_offset"] :][: t["num_bytes"]]))
        for t in forgery.bucket["tensors"]
    ]
    config = run.put("config", forgery.config).model_dump(mode="json")
    word_bytes = 1 if "float8" in forgery.bucket["dtype"] else 2
    num_words = sum(t["num_bytes"] for t in forgery.bucket["tensors"]) // word_bytes
    blob = run.put("factors", head + raw)
    whole = {"object": 0, "offset": 0, "size_bytes": blob.size_bytes, "sha256": blob.sha256}
    given = forgery.manifest
    anchor = run.anchor.model_dump(mode="json") | {"state_root": given.get("base_root", base.state_root)}
    anchor["version"] = given.get("base_version", 0)
    stored_layout = run.put("layout of the adapter", layout).model_dump(mode="json")
    if "size_of_layout" in given:
        stored_layout["size_bytes"] = given["size_of_layout"]
    file = {"name": ADAPTER_CONFIG, "blob": config}
    if forgery.size_of_config:
        file["blob"] = config | {"size_bytes": forgery.size_of_config}
    document = {
        "kind": "adapter", "run_id": given.get("run_id", "r1"), "version": given.get("version", 1), "step": 1,
        "epoch": 1, "anchor": anchor, "layout": stored_layout, "objects": [blob.model_dump(mode="json")],
        "buckets": [{
            "codec": "safetensors", "stored": whole, "num_words": num_words, "num_changed": num_words,
            "new_xxh3": bucket_codec.bucket_xxh3(np.frombuffer(raw, np.uint8)),
        }],
        "state_root": given.get("state_root", adapter_digest(anchor["state_root"], config["sha256"], tensors)),
        "model_files": [file],
    }  # fmt: skip
    return json.dumps(document).encode(), run


def _xxh3(data: bytes) -> str:
    return tensor_digest("x", "bfloat16", (1,), memoryview(data)).xxh3


def _header(bucket: dict[str, Any]) -> bytes:
    tensors = tuple(PlacedTensor.model_construct(**fields) for fields in bucket["tensors"])
    return shard_header(Bucket.model_construct(dtype=bucket["dtype"], tensors=tensors))


def export(forgery: Forgery, folder: Path) -> None:
    data, run = publish(forgery)
    run.objects["m"] = data
    ref = BlobRef(key="m", size_bytes=forgery.manifest.get("size", len(data)), sha256=hashlib.sha256(data).hexdigest())
    manifest, blobs = VersionManifest.from_json(data), cast(Blobs, run)
    reader = WeightReader(blobs, "r1")
    manifest = reader.manifest(ref, PolicyVersion(manifest.version))
    export_adapter(manifest, folder / "adapter", reader=reader, blobs=blobs)
    export_version(manifest, folder / "model", reader=reader, blobs=blobs)


def test_an_honest_adapter_passes(tmp_path: Path) -> None:
    """What the forgeries start from is a folder for engines, and a merged model."""
    export(Forgery(), tmp_path)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (tmp_path / "adapter" / ADAPTER_CONFIG).read_bytes() == ADAPTER.to_json()


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_adapter_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the errors that a worker reports as a refused version, and nothing is left in the folder."""
    forgery = Forgery()
    FORGERIES[what](forgery)
    monkeypatch.setattr(PublishedWeights, "most_bytes", 10**9)  # more would be read into memory
    with pytest.raises(UNUSABLE):
        export(forgery, tmp_path)
    assert list(tmp_path.iterdir()) == []
