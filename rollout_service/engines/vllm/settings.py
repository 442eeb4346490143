"""The ``vllm`` section: how a worker starts vLLM servers of its own (``worker.engine = "vllm"``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section

# Flags that the worker sets, and flags that the contract forbids.
_RESERVED = frozenset(
    {
        "--model",
        "--host",
        "--port",
        "--load-format",
        "--logprobs-mode",
        "--generation-config",
        "--override-generation-config",
        "--enable-scale-out",
        "--tokens-only",
        "--skip-tokenizer-init",
        "--served-model-name",
        "--enable-lora",
        "--lora-modules",
        "--api-server-count",
        "--headless",
        "--api-key",
    }
)


class VllmSettings(Section):
    """vLLM servers that the worker starts, watches and stops; a flag that is not set here has vLLM's default."""

    python: Path | None = Field(
        None, description="Python of vLLM's own environment, such as /opt/vllm/bin/python; none: the worker's own."
    )
    command: tuple[str, ...] = Field(
        (),
        description="Instead of python: the words that start the server, before its flags, such as a container's "
        "['docker', 'run', …, 'vllm', 'serve'].",
    )
    environ: dict[str, str] = Field(
        {}, description="Environment variables of the server, besides the worker's own without PYTHON* and PENSTOCK_*."
    )
    engines: int = Field(1, ge=1, le=64, description="Servers of this worker; a group's samples all go to one of them.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="--dtype of the weights.")
    tensor_parallel_size: int = Field(1, ge=1, description="--tensor-parallel-size: GPUs that share every layer.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="--gpu-memory-utilization: share of the GPU's memory for weights, keys and values.",
    )
    max_model_len: int | None = Field(None, ge=1, description="--max-model-len, where shorter than the model's.")
    max_num_seqs: int | None = Field(None, ge=1, description="--max-num-seqs: sequences decoded at once.")
    quantization: str | None = Field(None, description="--quantization: 'fp8', …")
    max_lora_rank: int | None = Field(
        None,
        ge=1,
        description="--enable-lora and --max-lora-rank: largest rank of an adapter, for a run whose versions are adapters "
        "(model.lora.rank at least); none: the server takes no adapters.",
    )
    max_loras: int | None = Field(None, ge=1, description="--max-loras: adapters decoded together.")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="--max-cpu-loras: adapters held in host memory; at least max_loras."
    )
    extra_args: tuple[str, ...] = Field((), description="Further flags, as they are: ['--enforce-eager', …].")

    @field_validator("extra_args")
    @classmethod
    def _not_reserved(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        taken = sorted({word.split("=", 1)[0] for word in value} & _RESERVED)
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be passed on: the worker sets it, or the contract forbids it")
        return value

    @model_validator(mode="after")
    def _one_way_to_start(self) -> VllmSettings:
        if self.command and self.python is not None:
            raise ValueError("vllm.command and vllm.python are both set; the command names its own Python, drop one")
        return self

    @model_validator(mode="after")
    def _adapters_are_enabled(self) -> VllmSettings:
        if self.max_lora_rank is None:
            unused = ("max_loras", "max_cpu_loras")
            if given := [name for name in unused if name in self.model_fields_set]:
                raise ValueError(f"vllm.{given[0]} has no effect without vllm.max_lora_rank; set that too")
        return self
