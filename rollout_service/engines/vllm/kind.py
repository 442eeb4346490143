"""vLLM as a kind of engine: servers at a URL, and servers that the worker starts, with their command line and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.engine_process import LaunchCommand, child_environ, with_parent
from penstock.rollout_service.engines.vllm.client import VllmClient
from penstock.rollout_service.engines.vllm.settings import VllmSettings

_SWITCHES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for pauses, weights and the prefix cache
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_command(settings: VllmSettings) -> LaunchCommand:
    """Return how a server is started. vLLM takes no version label: `VllmClient.started_with` sets it."""

    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        python = str(settings.python or sys.executable)
        program = settings.command or (python, "-m", "vllm.entrypoints.cli.main", "serve")
        return [
            *with_parent(os.getpid(), port_file),
            *program,
            str(folder),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *_flags(settings),
        ]

    return command


def vllm_environ(settings: VllmSettings, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of server ``number``: the worker's without its own variables, plus what the settings add.

    Server ``number`` sees the GPUs from ``number * tensor_parallel_size`` on.
    """
    passed = child_environ(environ) | _SWITCHES
    if number or settings.engines > 1:
        size = settings.tensor_parallel_size
        visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        gpus = visible or [str(gpu) for gpu in range(settings.engines * size)]
        passed["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * size : (number + 1) * size])
    return passed | settings.environ


def _flags(settings: VllmSettings) -> list[str]:
    # "processed_logprobs" are those after the temperature, of the distribution that was sampled; "vllm" keeps a model's
    # generation_config.json from changing it; the token routes are off without --enable-scale-out.
    flags = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    valued = {
        "--dtype": settings.dtype,
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--quantization": settings.quantization,
        "--max-lora-rank": settings.max_lora_rank,
        "--max-loras": settings.max_loras,
        "--max-cpu-loras": settings.max_cpu_loras,
    }
    for flag, value in valued.items():
        if value is not None:
            flags += [flag, str(value)]
    if settings.max_lora_rank is not None:
        flags.append("--enable-lora")
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


VLLM_URL = EngineKind("vllm-url", VllmClient)
VLLM = EngineKind("vllm", VllmClient, _launches, options=VllmSettings, section="vllm")
