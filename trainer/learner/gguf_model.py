"""Convert a GGUF file to a Hugging Face model folder, once: the adapter of the package ``gguf``.

The folder is beside the file and named after it and the first digits of its SHA-256, so another file is another folder. It is
written under another name and renamed when it is complete; a lock makes other processes wait. Weights are dequantised to
float32: four bytes for each parameter. Nothing in the file is executed: it is read by the package after `gguf_header` has
checked it, and code in a model's repository is never loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import structlog

from penstock.protocol.errors import ConfigError
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.gguf_header import GgufHeader, is_gguf, read_header
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.gguf_model")

_DIGITS = 16
_LOCK_DEADLINE_S = 3600.0  # another process converts a large model
_POLL_S = 0.2


def with_model_folders(settings: TrainerSettings) -> TrainerSettings:
    """Return the settings with the folder of each model that is given as a GGUF file; raises as `model_folder` does."""
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
    """Return the checked header of a GGUF file; raises ConfigError without the package, UnsupportedModel for a bad file."""
    header = read_header(path)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model.path = {path} is a GGUF file, which needs the package gguf; install it: pip install 'penstock[gguf]'"
        )
    return header


def _convert(path: Path, header: GgufHeader, folder: Path) -> None:
    """Write ``folder``; called by one process at a time."""
    started = time.monotonic()
    log.info("converting a GGUF file, once", file=str(path), folder=str(folder), num_elements=header.num_elements)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        _write(path, header, partial)
        for one in (*partial.iterdir(), partial):
            _sync(one)
        partial.rename(folder)
        _sync(folder.parent)
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

    from penstock.trainer.learner.loaded_model_check import check_loaded  # noqa: PLC0415

    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path.parent, **source)
    with torch.device("meta"):
        described = sum(one.numel() for one in cast(Any, AutoModelForCausalLM).from_config(config).parameters())
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
    """Hold a lock that the kernel releases when the process ends; raises ConfigError after `_LOCK_DEADLINE_S`."""
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


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
