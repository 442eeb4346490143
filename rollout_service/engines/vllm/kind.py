"""vLLM as a kind of engine: servers at a URL, and servers that the worker starts as the section ``vllm`` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch, StartedServerSettings
from penstock.rollout_service.engines.engine_process import LaunchCommand, child_environ
from penstock.rollout_service.engines.vllm.client import VllmClient

# Flags that the worker sets, and flags that the contract forbids.
_RESERVED = frozenset({
    "--model", "--host", "--port", "--load-format", "--logprobs-mode", "--generation-config",
    "--override-generation-config", "--enable-scale-out", "--tokens-only", "--skip-tokenizer-init",
    "--served-model-name", "--enable-lora", "--lora-modules", "--api-server-count", "--headless", "--api-key",
    "--enable-sleep-mode",
})  # fmt: skip
_SWITCHES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for pauses, weights and the prefix cache
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_URL = EngineKind("vllm-url", VllmClient)


class VllmSettings(StartedServerSettings):
    """vLLM servers that the worker starts, watches and stops; a flag that is not set here has vLLM's default."""

    section = "vllm"
    reserved = _RESERVED
    size_key, fraction_key = "tensor_parallel_size", "gpu_memory_utilization"
    multiplying_flags = ("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
    of_adapters = ("max_loras", "max_cpu_loras")

    tensor_parallel_size: int = Field(1, ge=1, description="--tensor-parallel-size: GPUs that share every layer.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="--gpu-memory-utilization: share of the GPU's memory for weights, keys and values.",
    )
    max_model_len: int | None = Field(None, ge=1, description="--max-model-len: where shorter than the model's.")
    max_num_seqs: int | None = Field(None, ge=1, description="--max-num-seqs: sequences decoded at once.")
    max_loras: int | None = Field(None, ge=1, description="--max-loras: adapters decoded together.")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="--max-cpu-loras: adapters held in host memory; at least max_loras."
    )


def vllm_command(settings: VllmSettings) -> LaunchCommand:
    """Return how a server is started. vLLM takes no version label: `VllmClient.started_with` sets it."""

    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        words = settings.start_words(port_file, "-m", "vllm.entrypoints.cli.main", "serve")
        return [*words, str(folder), *_flags(settings)]

    return command


def vllm_environ(settings: VllmSettings, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of server ``number``: the worker's without its own variables, plus what the settings add.

    Server ``number`` sees its part of the worker's GPUs, in their order.
    """
    passed = child_environ(environ) | _SWITCHES
    if number or settings.engines > 1:
        size = settings.gpus
        visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        gpus = visible or [str(gpu) for gpu in range(settings.engines * size)]
        passed["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * size : (number + 1) * size])
    return passed | settings.environ


def _flags(settings: VllmSettings) -> list[str]:
    # "processed_logprobs" are those after the temperature, of the distribution that was sampled; "vllm" keeps a model's
    # generation_config.json from changing it; the token routes are off without --enable-scale-out.
    constant = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    flags = [*constant, *settings.flags()]
    if settings.max_lora_rank is not None:
        flags.append("--enable-lora")
    if settings.memory_saver:
        flags.append("--enable-sleep-mode")
    return [*flags, *settings.extra_args]


def _launches(settings: VllmSettings, environ: Mapping[str, str]) -> list[ServerLaunch]:
    return [
        ServerLaunch(
            vllm_command(settings),
            f"vllm-{number}.log",
            environ=vllm_environ(settings, number, environ),
            context_length=settings.max_model_len,
        )
        for number in range(settings.engines)
    ]


VLLM = EngineKind("vllm", VllmClient, _launches, options=VllmSettings, section="vllm")
