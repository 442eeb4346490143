"""SGLang as a kind of engine: servers at a URL, and servers that the worker starts as the section ``sglang`` says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch, StartedServerSettings
from penstock.rollout_service.engines.engine_process import LaunchCommand, child_environ
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.weight_patch import PLUGIN, PLUGIN_NAME

# Flags that the worker sets, and flags that the contract forbids.
_RESERVED = frozenset({
    "--model-path", "--model", "--host", "--port", "--weight-version", "--load-format", "--tokenizer-worker-num",
    "--skip-tokenizer-init", "--sampling-defaults", "--preferred-sampling-params", "--enable-lora", "--lora-paths",
    "--enable-memory-saver", "--incremental-streaming-output", "--nnodes", "--node-rank", "--dist-init-addr",
})  # fmt: skip
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SGLANG_URL = EngineKind("sglang-url", SglangClient, returns_experts=True)


class SglangSettings(StartedServerSettings):
    """SGLang servers that the worker starts, watches and stops; a flag that is not set here has SGLang's default."""

    section = "sglang"
    reserved = _RESERVED
    size_key, fraction_key = "tp_size", "mem_fraction_static"
    multiplying_flags = ("--pp-size", "--pipeline-parallel-size")
    of_adapters = ("lora_target_modules", "max_loras_per_batch", "max_loaded_loras", "lora_backend")

    device: str | None = Field(None, description="--device: 'cuda', 'cpu', …; none: what SGLang finds.")
    tp_size: int = Field(1, ge=1, description="--tp-size: GPUs that share every layer.")
    ep_size: int = Field(1, ge=1, description="--ep-size: GPUs that share a mixture's experts.")
    dp_size: int = Field(1, ge=1, description="--dp-size: replicas behind one server.")
    gpus_per_engine: int | None = Field(
        None,
        ge=1,
        description="GPUs between the first ones of two servers; none: tp_size x dp_size, and as many more as --pp-size in extra_args.",
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="--mem-fraction-static: share of the GPU's memory for weights and keys and values.",
    )
    context_length: int | None = Field(None, ge=1, description="--context-length: where shorter than the model's.")
    max_running_requests: int | None = Field(
        None, ge=1, description="--max-running-requests: sequences decoded at once."
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="--max-total-tokens: tokens whose keys and values are kept; on a CPU it must be set."
    )
    attention_backend: str | None = Field(None, description="--attention-backend: 'fa3', 'flashinfer', 'triton', …")
    lora_target_modules: tuple[str, ...] = Field(
        _LAYERS,
        description="--lora-target-modules, the last words of the names of all layers that an adapter may change.",
    )
    max_loras_per_batch: int | None = Field(
        None, ge=2, description="--max-loras-per-batch: adapters decoded together, the weights alone counted as one."
    )
    max_loaded_loras: int | None = Field(
        None,
        ge=2,
        description="--max-loaded-loras: adapters held; beyond, the one used longest ago is loaded again when asked for.",
    )
    lora_backend: str | None = Field(None, description="--lora-backend: 'csgmv', 'triton', 'torch_native', …")
    fp32_lm_head: bool = Field(
        False,
        description="--enable-fp32-lm-head; for a run with model.head_dtype = 'float32', of which `penstock train --local` sets it.",
    )
    metrics: bool = Field(True, description="--enable-metrics; the worker reports them in its heartbeat.")
    patches: Literal["auto", "off"] = Field(
        "auto",
        description="'auto': a version that changes few values is written into the server's weights where they are, and others are "
        "loaded from their folder; 'off': each is loaded from its folder.",
    )

    @model_validator(mode="after")
    def _replicas_have_no_adapters(self) -> SglangSettings:
        if self.max_lora_rank is not None and self.dp_size > 1:
            raise ValueError(
                "sglang.dp_size above 1 and sglang.max_lora_rank: SGLang loads no adapters into replicas; use sglang.engines"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one server; with attention in replicas (--enable-dp-attention) these are among those of the layers."""
        replicas = 1 if "--enable-dp-attention" in self.extra_args else self.dp_size
        return self.gpus_per_engine or super().gpus * replicas


def sglang_command(settings: SglangSettings, number: int = 0) -> LaunchCommand:
    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        words = settings.start_words(port_file, "-m", "sglang.launch_server")
        return [*words, "--model-path", str(folder), "--weight-version", str(version), *_flags(settings, number)]

    return command


def sglang_environ(settings: SglangSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: the worker's without its own variables, plus what the settings and the plugin add."""
    passed = child_environ(environ) | settings.environ
    if settings.patches == "auto":
        passed["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), passed.get("PYTHONPATH")]))
        if chosen := passed.get("SGLANG_PLUGINS"):  # none: SGLang loads all
            passed["SGLANG_PLUGINS"] = f"{chosen},{PLUGIN_NAME}"
    return passed


def _flags(settings: SglangSettings, number: int) -> list[str]:
    # A server with the load format "dummy" refuses updates; with several tokenizer processes only one knows the version;
    # "openai" keeps a model's generation_config.json from changing the distribution that is sampled.
    constant = ["--load-format", "auto", "--tokenizer-worker-num", "1", "--sampling-defaults", "openai"]
    flags = [*constant, *settings.flags()]
    if settings.fp32_lm_head:
        flags.append("--enable-fp32-lm-head")
    if settings.metrics:
        flags.append("--enable-metrics")
    if settings.memory_saver:
        flags.append("--enable-memory-saver")
    if settings.max_lora_rank is not None:
        # Without strict loading, a tensor of an adapter that no layer takes would be ignored without an error.
        flags += ["--enable-lora", "--lora-strict-loading", "--lora-target-modules", *settings.lora_target_modules]
    if number:
        flags += ["--base-gpu-id", str(number * settings.gpus)]
    return [*flags, *settings.extra_args]


def _launches(settings: SglangSettings, environ: Mapping[str, str]) -> list[ServerLaunch]:
    passed = sglang_environ(settings, environ)
    return [
        ServerLaunch(
            sglang_command(settings, number),
            f"sglang-{number}.log",
            environ=passed,
            context_length=settings.context_length,
        )
        for number in range(settings.engines)
    ]


SGLANG = EngineKind("sglang", SglangClient, _launches, options=SglangSettings, section="sglang", returns_experts=True)
