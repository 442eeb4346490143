"""Reads checkpoints that DeepSpeed wrote, as releases before the shards of `shard_files.py` did."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.trainer.errors import CheckpointError

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # a setting of torch that stands above what its caller asks for


def load_written_by_deepspeed(engine: Any, folder: Path, *, num_ranks: int, strict: bool) -> dict[str, Any]:
    """Read ``folder`` into a DeepSpeed engine and return its state.

    Raises CheckpointError for another number of ranks or a broken folder.
    """
    try:
        with _without_pickled_code():
            found, state = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=strict)
    except Exception as err:  # DeepSpeed and torch raise many kinds of errors for a broken folder
        if "Error(s) in loading state_dict" in str(err):
            raise another_model(folder, err) from err
        raise CheckpointError(
            f"checkpoint {folder} is not readable ({type(err).__name__}: {err}); restore it from a copy, or "
            "remove its folder and set trainer.resume_older_step to the step of the one before it"
        ) from err
    if found is None or state.get("num_ranks") != num_ranks:
        raise CheckpointError(
            f"checkpoint {folder} was written by {(state or {}).get('num_ranks', 'an unknown number of')} rank(s) of a release "
            f"whose checkpoints need as many, this run has {num_ranks}; start it with the same trainer.num_ranks once: "
            "its next checkpoint can be resumed by any number"
        )
    return state


def another_model(folder: Path, err: Exception) -> CheckpointError:
    """Return the error for a checkpoint whose parameters are not those of the model."""
    return CheckpointError(
        f"checkpoint {folder} is of another model than model.path ({str(err).splitlines()[0]}); set model.path back to the model "
        "of this run, or start another run from the new model with another run.id"
    )


@contextlib.contextmanager
def _without_pickled_code() -> Iterator[None]:
    """Have ``torch.load`` refuse pickled code inside the block; DeepSpeed asks it to run whatever a checkpoint's files name.

    What is allowed are the classes of DeepSpeed's own figures: none of them does anything when it is made.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: PLC0415
    from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: PLC0415
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415

    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before
