"""Translates settings into DeepSpeed's configuration; pure."""

from __future__ import annotations

from typing import Any, Literal

import torch

from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import BFLOAT16_UNSHARDED

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
        config["bf16"]["immediate_grad_update"] = (
            True  # stage 1 would hold the bfloat16 gradients beside their sums until the next step
        )
    if offload != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload == "parameters":
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if zero_stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = keep_whole_below
    return config
