"""The section [model] of the run file: the policy; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.trainer.lora_settings import LoraSettings

_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD, and WSL
_HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def default_dtype() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where this process sees a GPU, else float32; looks for device files, and loads no driver."""
    if any(os.environ.get(name, "all").strip() in ("", "-1") for name in _HIDES_GPUS):
        return "float32"
    return "bfloat16" if any(Path(file).exists() for file in _GPU_FILES) else "float32"


class ModelSettings(Section):
    """The policy and its numeric format."""

    path: Path = Field(
        description="Hugging Face model folder: config.json, safetensors, tokenizer, chat template; or a GGUF file, which is "
        "converted to such a folder beside it; or the id OWNER/NAME of one on the Hugging Face hub, OWNER/NAME@REVISION.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default_factory=default_dtype,
        description="Of forward and backward. Without it bfloat16 where the trainer sees a GPU, and float32, with which the embedded "
        "engine agrees, where it does not. In float32 a GPU has neither tensor cores nor flash attention.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass: less memory, about a third more compute.",
    )
    activation_offload: bool = Field(
        default=False,
        description="Keep what gradient checkpointing holds of each layer in host memory until the backward pass; saves nothing "
        "where the CPU trains.",
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="Low-rank adapters.")
    train_vision_tower: bool = Field(
        default=False,
        description="Train the part of a model that reads images too; otherwise it stays as it is, and its images are computed "
        "without gradients.",
    )

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> ModelSettings:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "model.activation_offload moves what gradient checkpointing keeps, and model.gradient_checkpointing is false; "
                "set it to true"
            )
        return self
