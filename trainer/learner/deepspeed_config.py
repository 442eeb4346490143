"""DeepSpeed's configuration from the settings, the learning rate over the steps, and checkpoints that DeepSpeed wrote in earlier releases."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.protocol.errors import ConfigError
from penstock.trainer.errors import CheckpointError
from penstock.trainer.fine_tuning_settings import Schedule
from penstock.trainer.settings import BFLOAT16_UNSHARDED


def lr_factor(step: int, *, schedule: Schedule, num_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Return the factor of the peak learning rate at optimizer step ``step`` (0 is the first).

    Warm-up rises linearly to 1, starting above 0 at the first step; then the schedule falls from 1 to
    ``min_lr_ratio`` at the last step (`constant`: stays at 1).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
    fall = progress if schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - min_lr_ratio) * fall


KEEP_WHOLE_BELOW = 100_000  # DeepSpeed's default: smaller parameters are not partitioned by ZeRO-3


def deepspeed_config(
    *,
    zero_stage: int,
    dtype: Literal["float32", "bfloat16"],
    max_grad_norm: float,
    keep_whole_below: int = KEEP_WHOLE_BELOW,
    offload: Literal["none", "optimizer", "parameters"] = "none",
    gradient_dtype: Literal["float32", "as-trained"] = "float32",
) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Gradient accumulation is 1 for any number of micro-batches: that number varies from step to step, so
    `Trainable` sets the boundary itself, and the loss is already divided by the whole batch's denominators.
    The optimizer is PyTorch's AdamW, so that no operator is compiled, also where it steps in host memory.

    Gradients of a bfloat16 model are added up in float32 by default, over micro-batches and over ranks: each of DeepSpeed's two
    settings alone leaves the other sum in bfloat16.

    Raises ConfigError for bfloat16 with stage 0, which drifts from a correct run within 20 steps.
    """
    if dtype == "bfloat16" and zero_stage == 0:
        raise ConfigError(BFLOAT16_UNSHARDED)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if dtype == "bfloat16" and gradient_dtype == "float32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
        # Otherwise stage 1 would hold the bfloat16 gradients beside their sums until the next step.
        config["bf16"]["immediate_grad_update"] = True
    if offload != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload == "parameters":
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if zero_stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = keep_whole_below
    return config


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
