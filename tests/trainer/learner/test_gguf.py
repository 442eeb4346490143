"""A GGUF file as model.path: converted once, completely or not at all; malformed files are refused before a library reads them."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tests import gguf_file
from tests.deadline import ends_within
from tests.gguf_file import write_gguf

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import gguf_model
from penstock.trainer.learner.gguf_model import is_gguf, model_folder, read_header, with_model_folders
from penstock.trainer.settings import TrainerSettings

WORDS = "the package gguf"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def file(tmp_path: Path, written: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(written)
    return path


def test_a_gguf_file_becomes_an_ordinary_model_folder_once(file: Path) -> None:
    """Weights are the dequantised ones, engine and tokenizer read the folder, leftovers of a killed process are replaced."""
    partials = file.with_name(f".tiny-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}.partial")
    partials.mkdir()
    (partials / "model.safetensors").write_bytes(b"half")
    folder = model_folder(file)
    assert not partials.exists()
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in gguf_file.tensors().items():
        if "ffn_down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            expected = gguf.dequantize(gguf.quantize(tensor, kind), kind)
            layer = name.split(".")[1]
            assert np.array_equal(tensors[f"model.layers.{layer}.mlp.down_proj.weight"].numpy(), expected)
    assert read_model_config(folder).num_layers == gguf_file.LAYERS
    assert ChatTokenizer.read(folder).eos_ids == (gguf_file.TOKENS.index("<|im_end|>"),)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    settings = TrainerSettings.model_validate(
        {
            "model": {"path": file},
            "critic": {"path": file},
            "algorithm": {"name": "ppo", "reference_path": file, "kl_coefficient": 0.1},
        }
    )
    used = with_model_folders(settings)
    assert used.model.path == used.critic.path == used.algorithm.reference_path == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert model_folder(folder) == folder


def test_values_that_describe_a_larger_model_than_the_tensors_are_refused(tmp_path: Path) -> None:
    """No memory is allocated for parameters that are not in the file, and nothing is left beside it."""
    path = tmp_path / "wide.gguf"
    write_gguf(path, embedding=1 << 20)
    with pytest.raises(UnsupportedModel, match=r"describe \d+ parameters, its tensors have 20832; restore"):
        model_folder(path)
    assert [one.name for one in tmp_path.iterdir() if not one.name.endswith(".lock")] == ["wide.gguf"]


def test_without_the_package_the_error_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(ConfigError, match=rf"needs {WORDS}; install it: pip install 'penstock\[gguf\]'"):
        model_folder(file)


def test_a_conversion_by_another_process_is_waited_for_until_a_deadline(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "_LOCK_DEADLINE_S", 0.0)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    with file.with_name(f".tiny-{digest}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has been converting"):
            model_folder(file)


def _value(name: bytes, kind: int, data: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + data


def _header(*values: bytes, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(values)) + b"".join(values) + tensors


def _tensor(name: bytes, *dims: int) -> bytes:
    return struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, len(dims), *dims, 0, 0)


LLAMA = _value(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
ONE_LAYER = _value(b"llama.block_count", 4, struct.pack("<I", 1))
BLOCK = _tensor(b"blk.0.ffn_up.weight", 4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a readable GGUF file"),
        (b"PK\3\4" + bytes(60), "does not start with GGUF"),
        (_header(version=1 << 16), "GGUF version 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "tensors and 0 values: expected at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "0 tensors and"),
        (_header(_value(b"n", 8, struct.pack("<Q", 1 << 60))), "is beyond its end"),
        (_header(_value(b"n", 9, struct.pack("<IQ", 4, 1 << 60))), "is beyond its end"),
        (_header(_value(b"n", 9, struct.pack("<IQ", 8, 1 << 60))), "not a readable GGUF file"),
        (_header(_value(b"n", 9, struct.pack("<IQ", 9, 1 << 60))), "n: unknown type 9"),
        (_header(_value(b"n", 99, b"")), "n: unknown type 99"),
        (_header(LLAMA, ONE_LAYER, tensors=_tensor(b"w", *[1] * 5), num_tensors=1), "has 5 dimensions"),
        (_header(LLAMA, ONE_LAYER, tensors=_tensor(b"w", 1 << 50), num_tensors=1), "elements; restore"),
        (_header(LLAMA, ONE_LAYER, tensors=BLOCK, num_tensors=1), "the file is cut off"),
        (_header(ONE_LAYER), "names no general.architecture"),
        (_header(LLAMA, ONE_LAYER), "it has tensors of 0 layers"),
        (_header(LLAMA, ONE_LAYER, _value(b"split.count", 2, struct.pack("<H", 3))), "one of 3 parts"),
        (_header(LLAMA, ONE_LAYER, _value(b"split.count", 8, struct.pack("<Q", 1) + b"x")), "one of x parts"),
        (_header(LLAMA, ONE_LAYER, _value(b"llama.vocab_size", 10, struct.pack("<Q", 1 << 60)), tensors=BLOCK, num_tensors=1)
         + bytes(64), "llama.vocab_size = .*: expected at most"),
        (_header(LLAMA, ONE_LAYER, _value(b"x", 6, struct.pack("<f", float("nan"))), tensors=BLOCK, num_tensors=1)
         + bytes(64), "x = nan: expected at most"),
    ],
)  # fmt: skip
def test_a_malformed_header_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    """Lengths, counts, types and sizes of the file itself decide, before the package reads it."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert is_gguf(path)
    with pytest.raises(UnsupportedModel, match=reason):
        read_header(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(UnsupportedModel, match="not a regular file"), ends_within(20):
        read_header(tmp_path / "a.gguf")


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "cut.gguf"
    assert read_header_of(path, written) is None
    for length in range(0, len(written) // 4, 97):
        assert read_header_of(path, written[:length])


def read_header_of(path: Path, data: bytes) -> str | None:
    path.write_bytes(data)
    try:
        read_header(path)
    except UnsupportedModel as err:
        return str(err)
    return None


def test_a_folder_and_another_file_are_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "renamed").write_bytes(b"GGUF")
    assert [is_gguf(tmp_path / name) for name in ("notes.txt", "renamed", "none.gguf", ".")] == [
        False,
        True,
        False,
        False,
    ]
