"""Model folders from strangers: no code is run, nothing is unpickled, and only tensors of the files are trained."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - what must not be read
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.deadline import ends_within

from penstock.protocol.model_folder import read_header, read_object
from penstock.protocol.tokenizer_file import check_tokenizer
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused
from penstock.rollout_service.embedded_engine.model.weights import _files_of, read_safetensors
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.load_model import load_language_model
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.version_writer import small_files
from penstock.trainer.ranks import Ranks

HOW: Any = SimpleNamespace(dtype="float32", gradient_checkpointing=False, zero_stage=1)
FIRST = "model.embed_tokens.weight"
Change = Callable[[Path], object]


@pytest.fixture
def model(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def config(**values: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def content(name: str, data: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(data)


def header(
    edit: Callable[[dict[str, Any]], object] = lambda _: None, *, length: int | None = None, more: bytes = b""
) -> Change:
    """Rewrite the header of the safetensors file; its data stay."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        entries = json.loads(raw[8 : 8 + size])
        edit(entries)
        data = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(data) if length is None else length) + data + raw[8 + size :] + more)

    return change


def offsets(*of_first: object) -> Change:
    return header(lambda entries: entries[FIRST].update(data_offsets=list(of_first)))


def index(name: object) -> Change:
    """Move the weights out of the folder, and name them in the index."""

    def change(folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        names = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]).keys() - {"__metadata__"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))

    return change


class _OpensFile:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.mark, "w")


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_OpensFile(str(folder.parent / "mark"))))


def _own_code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'mark')!r}, 'w')\nclass M: pass\n")
    config(auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, model_type="evil")(folder)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _not_a_number(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4:] = struct.pack("<f", float("nan"))
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(shutil.rmtree, r"no config\.json found", id="no folder"),
        pytest.param(config(model_type="toaster"), "not a usable causal", id="not a model"),
        pytest.param(_own_code, "code in the folder is never executed", id="auto_map"),
        pytest.param(_pickle, "other formats can contain code", id="a pickle"),
        pytest.param(content("adapter_config.json", b'{"base_model_name_or_path": ""}'), "is an adapter", id="adapter"),
        pytest.param(config(_attn_implementation="a/kernel"), "kernels are not downloaded", id="a kernel to download"),
        pytest.param(config(text_config={"attn_implementation": "a/b"}), "not downloaded", id="the same, nested"),
        pytest.param(
            config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            r"quantization_config \(bitsandbytes\).*QLoRA", id="quantized",
        ),
        pytest.param(config(num_hidden_layers=3), r"the files have no .*layers\.2", id="a layer more"),
        pytest.param(config(num_hidden_layers=1), r"config\.json has no .*layers\.1", id="a layer less"),
        pytest.param(config(hidden_size=128), "not a usable causal", id="another width"),
        pytest.param(config(vocab_size=100), "not a usable causal", id="another vocabulary"),
        pytest.param(config(num_hidden_layers=10**9), "expected 0 to 10000", id="layers without end"),
        pytest.param(config(num_hidden_layers=-2), "expected 0 to 10000", id="negative layers"),
        pytest.param(config(text_config={"n_layer": -1}), "expected 0 to 10000", id="negative layers, nested"),
        pytest.param(config(rope_theta=float("inf")), "rope_theta = inf: expected at most", id="Infinity"),
        pytest.param(config(rope_theta=float("nan")), "rope_theta = nan: expected at most", id="NaN"),
        pytest.param(content("config.json", b'{"a": [[1e999]]}'), "a = inf: expected at most", id="1e999"),
        pytest.param(header(lambda h: h[FIRST].update(dtype=["F32"])), "no dtype, shape and offsets", id="dtypes"),
        pytest.param(config(hidden_size=10**12), "expected at most 2147483648", id="a huge width"),
        pytest.param(config(rope_theta=1e300), "expected at most 2147483648", id="a huge number"),
        pytest.param(config(vocab_size=-1), "not a usable causal", id="a negative vocabulary"),
        pytest.param(config(num_attention_heads=0), "ZeroDivisionError", id="no heads"),
        pytest.param(config(num_attention_heads="4"), "not a usable causal", id="a text as number"),
        pytest.param(config(model_type=["a"]), "not a usable causal", id="a list as type"),
        pytest.param(config(hidden_act="os.system"), "not a usable causal", id="an unknown function"),
        pytest.param(content("config.json", b"[]"), "expected a JSON object", id="a list as configuration"),
        pytest.param(content("config.json", b"[" * 100_000), "not JSON", id="a nested configuration"),
        pytest.param(content("config.json", b"\0" * 10), "not JSON", id="NUL"),
        pytest.param(config(x=[0] * 300_000), "more than 200000 values", id="a list of numbers"),
        pytest.param(config(x="\ud800"), "surrogates not allowed", id="half of a surrogate pair"),
        pytest.param(_cut, r"[\d,]+ bytes, its header says [\d,]+: it is cut off", id="truncated"),
        pytest.param(content("model.safetensors", b""), "not a safetensors file", id="empty"),
        pytest.param(header(length=2**62), "not a safetensors file", id="a huge header"),
        pytest.param(content("model.safetensors", struct.pack("<Q", 4) + b"[[[["), "not a safetensors", id="no JSON"),
        pytest.param(offsets(0, 8), "SafetensorError", id="overlapping offsets"),
        pytest.param(offsets("a", None), "not a safetensors file", id="offsets that are no numbers"),
        pytest.param(offsets(-8, 8), "no dtype, shape and offsets", id="negative offsets"),
        pytest.param(header(lambda h: h[FIRST].update(shape=[2**40, 2**40])), "SafetensorError", id="a huge shape"),
        pytest.param(header(lambda h: h[FIRST].update(dtype="I32")), "expected floating-point", id="integers"),
        pytest.param(header(lambda h: h[FIRST].update(dtype="Q9")), "expected floating-point", id="an unknown dtype"),
        pytest.param(header(lambda h: h[FIRST].pop("dtype")), "not a safetensors file", id="no dtype"),
        pytest.param(header(lambda h: h.update({"x": h.pop(FIRST)})), "the files have no", id="another name"),
        pytest.param(header(lambda h: h.update({"y": h[FIRST]})), "SafetensorError", id="shared bytes"),
        pytest.param(header(lambda h: h.pop(FIRST)), "SafetensorError", id="a hole"),
        pytest.param(header(more=b"x" * 100), "SafetensorError", id="bytes after the end"),
        pytest.param(index("../outside.safetensors"), "name of a safetensors file in this folder", id="a name with .."),
        pytest.param(index("/etc/passwd"), "name of a safetensors file in this folder", id="an absolute name"),
        pytest.param(index(7), "name of a safetensors file in this folder", id="a number as name"),
        pytest.param(index("model-2.safetensors"), "is not in the folder", id="a missing file"),
        pytest.param(_not_a_number, "has NaN", id="NaN"),
    ],
)  # fmt: skip
def test_a_hostile_model_folder_is_refused(model: Path, change: Change, expected: str) -> None:
    change(model)
    with pytest.raises(UnsupportedModel, match=expected), ends_within(30):
        load_language_model(model, HOW, ParallelDims(Ranks.__new__(Ranks)))
    assert not (model.parent / "mark").exists()


def test_the_embedded_engine_reads_no_file_outside_of_its_folder(model: Path) -> None:
    """Names of an index that leave the folder, or are no names, are refused there too; a pipe is not waited for."""
    places: tuple[Change, ...] = (os.mkfifo, lambda path: path.symlink_to("/dev/zero"))
    for make in places:
        make(other := model.parent / "other")
        for read in (read_header, read_safetensors, read_object, check_tokenizer):
            with pytest.raises((UnsupportedModel, CheckpointRefused), match="not a regular file"), ends_within(20):
                read(other)
        other.unlink()
    (model / "model.safetensors").unlink()
    for name in ("../outside.safetensors", "/etc/passwd", 7, ["a"]):
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointRefused, match="the name of a safetensors file in this folder"):
            _files_of(model)


def test_a_link_out_of_the_folder_is_not_published(model: Path) -> None:
    """Config and tokenizer files are published with every version: a link would publish any file of the machine."""
    secret = model.parent / "secret.json"
    secret.write_text("{}")
    assert "config.json" in small_files(model, "float32")
    (model / "notes.json").symlink_to(secret)
    with pytest.raises(UnsupportedModel, match=r"notes\.json links to .*secret\.json, outside of the model folder"):
        small_files(model, "float32")


def test_links_of_the_hugging_face_cache_are_followed(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    assert small_files(snapshot, "float32").keys() == small_files(model, "float32").keys()
