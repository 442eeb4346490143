"""Convert a GGUF file to a Hugging Face model folder, once: the adapter of the package ``gguf``.

The folder is beside the file and named after it and the first digits of its SHA-256, so another file is another folder. It is
written under another name and renamed when it is complete; a lock makes other processes wait. Weights are dequantised to
float32: four bytes for each parameter. Nothing in the file is executed: it is read by the package after `read_header` has
checked it, and code in a model's repository is never loaded.

The header is a list of named values and a list of tensors. The package ``gguf`` trusts the lengths in it: a length beyond the end of the file
makes it loop without end, and sizes of a model that belong to no tensors would be allocated with random numbers.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import mmap
import re
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog

from penstock.protocol import files
from penstock.protocol.errors import ConfigError
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.settings import TrainerSettings

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_VALUES = 10_000
_MAX_TENSORS = 100_000
_MAX_DIMS = 4
_MAX_NUMBER = 2**31
_MAX_ELEMENTS = 2**40
_FEWEST_BITS = 1.5  # of a weight, in any quantisation: what a file's bytes can hold at most
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BLOCK = re.compile(r"blk\.(\d+)\.")
log = structlog.get_logger("trainer.gguf_model")
_DIGITS = 16
_LOCK_DEADLINE_S = 3600.0  # another process converts a large model
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class GgufHeader:
    architecture: str
    values: dict[str, Any]  # numbers and texts; arrays are checked and left out
    num_elements: int  # of all tensors together


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> GgufHeader:
    try:
        with (
            files.open_regular(path, follow=True) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _read(_Reader(data), len(data))
    except (OSError, ValueError, struct.error) as err:  # ValueError: an empty file, or text that is not UTF-8
        raise UnsupportedModel(f"model.path = {path}: not a readable GGUF file ({err}); restore the file") from None
    except _RefusedError as err:
        raise UnsupportedModel(f"model.path = {path}: {err}") from None


class _RefusedError(Exception):
    pass


class _Reader:
    """Reads numbers and texts one after the other; a struct.error or ValueError is a length beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.skip(length)
        return self._data[self.position - length : self.position].decode()

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise ValueError(f"a length of {num_bytes} bytes at byte {self.position} is beyond its end")
        self.position += num_bytes


def _read(reader: _Reader, size: int) -> GgufHeader:
    if reader.number("4s") != MAGIC:
        raise _RefusedError("it does not start with GGUF; set it to a GGUF file or a Hugging Face model folder")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise _RefusedError(f"GGUF version {version}: expected 2 or 3, little-endian; convert the model again")
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
        raise _RefusedError(
            f"{num_tensors} tensors and {num_values} values: expected at most {_MAX_TENSORS} and {_MAX_VALUES}; restore the file"
        )
    values = dict(_values(reader, num_values))
    blocks, num_elements = _tensors(reader, num_tensors)
    available = int((size - reader.position) * 8 / _FEWEST_BITS)
    if num_elements > available:
        raise _RefusedError(
            f"its tensors have {num_elements} elements, its {size} bytes at most {available}; the file is cut off, restore it"
        )
    _check_values(values, blocks)
    return GgufHeader(str(values["general.architecture"]), values, num_elements)


def _values(reader: _Reader, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        name, kind = reader.text(), reader.number("I")
        if kind == _ARRAY:
            _skip_array(reader, name)
        elif kind == _STRING:
            yield name, reader.text()
        else:
            yield name, reader.number(_code(kind, name))


def _skip_array(reader: _Reader, name: str) -> None:
    kind, length = reader.number("I"), reader.number("Q")
    if kind == _STRING:
        for _ in range(length):  # each has at least 8 bytes, so the loop ends with the file
            reader.skip(reader.number("Q"))
    else:
        reader.skip(length * struct.calcsize("<" + _code(kind, name)))


def _code(kind: int, name: str) -> str:
    if kind not in _SCALARS:
        raise _RefusedError(f"{name[:80]}: unknown type {kind}; restore the file")
    return _SCALARS[kind]


def _tensors(reader: _Reader, count: int) -> tuple[int, int]:
    layers, total = 0, 0
    for _ in range(count):
        name, num_dims = reader.text(), reader.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise _RefusedError(
                f"tensor {name[:80]} has {num_dims} dimensions: expected 1 to {_MAX_DIMS}; restore the file"
            )
        elements = 1
        for _ in range(num_dims):
            elements *= reader.number("Q")
        if not 0 < elements <= _MAX_ELEMENTS:
            raise _RefusedError(f"tensor {name[:80]} has {elements} elements; restore the file")
        reader.skip(4 + 8)  # type and offset
        total += elements
        if match := _BLOCK.match(name):
            layers = max(layers, int(match[1]) + 1)
    return layers, total


def _check_values(values: dict[str, Any], num_layers: int) -> None:
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        raise _RefusedError(
            "it names no general.architecture, so it is not a model; use a GGUF file of a language model"
        )
    parts = values.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        raise _RefusedError(
            f"it is one of {str(parts)[:80]} parts; join them with `llama-gguf-split --merge` of llama.cpp"
        )
    declared = values.get(f"{architecture}.block_count")
    if declared != num_layers or not num_layers:
        raise _RefusedError(
            f"{architecture}.block_count = {declared}, but it has tensors of {num_layers} layers; restore it"
        )
    for name, value in values.items():
        if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:
            raise _RefusedError(f"{name[:80]} = {value}: expected at most {_MAX_NUMBER}; restore the file")


def with_model_folders(settings: TrainerSettings) -> TrainerSettings:
    model = settings.model.model_copy(update={"path": model_folder(settings.model.path)})
    changed: dict[str, Any] = {"model": model}
    if settings.critic.path is not None:
        changed["critic"] = settings.critic.model_copy(update={"path": model_folder(settings.critic.path)})
    if settings.algorithm.reference_path is not None:
        folder = model_folder(settings.algorithm.reference_path)
        changed["algorithm"] = settings.algorithm.model_copy(update={"reference_path": folder})
    return settings.model_copy(update=changed)


def model_folder(path: Path) -> Path:
    """Return the folder that a GGUF file was converted to, converting it first if need be; another path unchanged.

    Raises:
        ConfigError: The package ``gguf`` is missing, the folder cannot be written, or another process never finishes.
        UnsupportedModel: The file is malformed, or not a causal language model that `transformers` reads.
    """
    if not is_gguf(path):
        return path
    header = check_gguf(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = path.with_name(f"{path.stem}-{digest[:_DIGITS]}")
    if folder.is_dir():
        return folder
    try:
        with _lock(path.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                _convert(path, header, folder)
    except OSError as err:
        raise ConfigError(
            f"model.path = {path}: cannot write {folder} ({err.strerror or err}); copy the file to a folder that can be written "
            f"to and has space for {4 * header.num_elements / 1e9:.1f} GB"
        ) from None
    return folder


def check_gguf(path: Path) -> GgufHeader:
    header = read_header(path)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model.path = {path} is a GGUF file, which needs the package gguf; install it: pip install 'penstock[gguf]'"
        )
    return header


def _convert(path: Path, header: GgufHeader, folder: Path) -> None:
    started = time.monotonic()
    log.info("converting a GGUF file, once", file=str(path), folder=str(folder), num_elements=header.num_elements)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        _write(path, header, partial)
        for path_of_file in (*partial.iterdir(), partial):
            files.fsync(path_of_file)
        files.replace(partial, folder, sync_folder=True)
    except (OSError, UnsupportedModel):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except Exception as err:  # noqa: BLE001 - a file from outside: transformers and gguf raise errors of every kind
        shutil.rmtree(partial, ignore_errors=True)
        raise UnsupportedModel(
            f"model.path = {path} (architecture {header.architecture}) cannot be converted ({type(err).__name__}: {err}); use a "
            "GGUF file of an architecture that transformers reads, or the model's Hugging Face folder"
        ) from None
    log.info("converted", folder=str(folder), seconds=round(time.monotonic() - started, 1))


def _write(path: Path, header: GgufHeader, folder: Path) -> None:
    import torch  # noqa: PLC0415  seconds of import, only where it is needed
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    from penstock.trainer.learner.load_model import check_loaded  # noqa: PLC0415
    from penstock.trainer.learner.trainable import import_deepspeed  # noqa: PLC0415

    import_deepspeed()  # `save_pretrained` imports it, too, and then it writes to stdout, where commands write their results
    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path.parent, **source)
    with torch.device("meta"):
        described = sum(
            parameter.numel() for parameter in cast(Any, AutoModelForCausalLM).from_config(config).parameters()
        )
    if described > header.num_elements:
        raise UnsupportedModel(
            f"model.path = {path}: its values describe {described} parameters, its tensors have {header.num_elements}; "
            "restore the file"
        )
    model: Any
    model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
        path.parent, dtype=torch.float32, output_loading_info=True, **source
    )
    check_loaded(model, report, path)
    plain = model.config
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config  # else `save_pretrained` refuses: the weights are not quantised any more
    with torch.device("meta"):
        saved = type(model)(plain)
    saved.load_state_dict(model.state_dict(), assign=True)
    saved.tie_weights()
    saved.generation_config = model.generation_config
    saved.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(folder)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    give_up = time.monotonic() + _LOCK_DEADLINE_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ConfigError(
                        f"another process has been converting this GGUF file for {_LOCK_DEADLINE_S:.0f} s ({path} is locked); "
                        "end that process"
                    ) from None
                time.sleep(_POLL_S)
        yield
