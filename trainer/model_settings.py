"""The section [model] of the run file with its table [model.lora], and the section [critic]; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section

_NOT_SERVED = ("embed_tokens", "lm_head")


class LoraSettings(Section):
    """Low-rank adapters that are trained instead of the model."""

    rank: int = Field(0, ge=0, description="Rank of the adapters; 0: no adapters, the whole model is trained.")
    alpha: float = Field(32.0, gt=0.0, description="The adapters are scaled by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of an adapter's input that is zeroed in a training pass."
    )
    targets: list[str] = Field(
        [], description='Layers by the end of their name ("q_proj"); none: every linear layer but the head.'
    )

    seed: int | None = Field(
        None, ge=0, description="Seed of the adapters' first values, and of dropout; none: run.seed."
    )

    publish: Literal["adapter", "merged"] = Field(
        "adapter",
        description="What a version is published as: 'adapter': the adapters alone, on a base model that is published once; "
        "engines serve several of them and never pause. 'merged': the whole model, as without adapters.",
    )

    @model_validator(mode="after")
    def _can_be_served(self) -> LoraSettings:
        unserved = [target for target in self.targets if target.rpartition(".")[2] in _NOT_SERVED]
        if unserved and self.rank and self.publish == "adapter":
            raise ValueError(
                f"model.lora.targets = {self.targets}: engines serve no adapter of {unserved[0]}; leave it out, or set "
                'model.lora.publish = "merged"'
            )
        return self

    @model_validator(mode="after")
    def _not_idle(self) -> LoraSettings:
        fields = type(self).model_fields
        idle = sorted(key for key in fields if key != "rank" and getattr(self, key) != fields[key].default)
        if idle and not self.rank:
            raise ValueError(f"model.lora.{idle[0]} does nothing while model.lora.rank is 0; set model.lora.rank too")
        return self


class CriticSettings(Section):
    """PPO's critic: its initial weights, its optimizer, and how its values become advantages."""

    path: Path | None = Field(
        None, description="Model folder whose weights the critic starts from, without the head; none: model.path."
    )
    lr: float = Field(1e-5, gt=0.0, description="Peak learning rate of the critic's AdamW, with trainer.schedule.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0 to critic.lr.")
    max_grad_norm: float = Field(1.0, gt=0.0, description="The critic's gradients are clipped to this norm.")
    head_start_steps: int = Field(0, ge=0, description="First steps of the run, in which only the critic is updated.")
    updates: int = Field(1, ge=1, description="Optimizer steps of the critic on each batch.")
    loss: Literal["mse", "huber"] = Field("mse", description="Value loss: half the squared error, or Huber's.")
    loss_coefficient: float = Field(
        1.0, gt=0.0, description="Factor on the value loss; it has an effect only through critic.max_grad_norm."
    )
    value_clip: float | None = Field(
        None,
        gt=0.0,
        description="Largest change of a value by the updates on one batch; none: unlimited; needs critic.updates > 1.",
    )
    gamma: float = Field(1.0, ge=0.0, le=1.0, description="Discount of later rewards, per token.")
    lam: float = Field(
        0.95,
        ge=0.0,
        le=1.0,
        description="GAE's lambda: 1 uses the rewards alone (no bias, high variance), 0 the critic's next value.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CriticSettings:
        if self.value_clip is not None and self.updates == 1:
            raise ValueError(
                f"critic.value_clip = {self.value_clip} does nothing with critic.updates = 1: it limits the change of a value "
                "since the batch arrived, which is 0 at the first update; raise critic.updates, or remove critic.value_clip"
            )
        return self


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
        "converted to such a folder beside it; or the id OWNER/NAME of one on the Hugging Face hub, OWNER/NAME@REVISION."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default_factory=default_dtype,
        description="Of forward and backward. Without it bfloat16 where the trainer sees a GPU, and float32, with which the embedded "
        "engine agrees, where it does not. In float32 a GPU has neither tensor cores nor flash attention.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more compute."
    )
    activation_offload: bool = Field(
        False,
        description="Keep what gradient checkpointing holds of each layer in host memory until the backward pass; saves nothing "
        "where the CPU trains.",
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="Low-rank adapters.")
    train_vision_tower: bool = Field(
        False,
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
