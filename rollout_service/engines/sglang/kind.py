"""SGLang as a kind of engine: servers at a URL, and servers that the worker starts, with their command line and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.engine_process import LaunchCommand, child_environ, with_parent
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.settings import SglangSettings


def sglang_command(settings: SglangSettings, number: int = 0) -> LaunchCommand:
    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        program = settings.command or (str(settings.python or sys.executable), "-m", "sglang.launch_server")
        return [
            *with_parent(os.getpid(), port_file),
            *program,
            *("--model-path", str(folder), "--weight-version", str(version)),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *_flags(settings, number),
        ]

    return command


def sglang_environ(settings: SglangSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: the worker's without its own variables, plus what the settings add."""
    return child_environ(environ) | settings.environ


def _flags(settings: SglangSettings, number: int) -> list[str]:
    # A server with the load format "dummy" refuses updates; with several tokenizer processes only one knows the version;
    # "openai" keeps a model's generation_config.json from changing the distribution that is sampled.
    flags = ["--load-format", "auto", "--tokenizer-worker-num", "1", "--sampling-defaults", "openai"]
    valued = {
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--tp-size": settings.tp_size,
        "--ep-size": settings.ep_size,
        "--dp-size": settings.dp_size,
        "--mem-fraction-static": settings.mem_fraction_static,
        "--context-length": settings.context_length,
        "--max-running-requests": settings.max_running_requests,
        "--max-total-tokens": settings.max_total_tokens,
        "--attention-backend": settings.attention_backend,
        "--quantization": settings.quantization,
        "--max-lora-rank": settings.max_lora_rank,
        "--max-loras-per-batch": settings.max_loras_per_batch,
        "--max-loaded-loras": settings.max_loaded_loras,
        "--lora-backend": settings.lora_backend,
    }
    for flag, value in valued.items():
        if value is not None:
            flags += [flag, str(value)]
    if settings.metrics:
        flags.append("--enable-metrics")
    if settings.max_lora_rank is not None:
        # Without strict loading, a tensor of an adapter that no layer takes would be ignored without an error.
        flags += ["--enable-lora", "--lora-strict-loading", "--lora-target-modules", *settings.lora_target_modules]
    if number:
        flags += ["--base-gpu-id", str(number * (settings.gpus_per_engine or settings.tp_size * settings.dp_size))]
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


SGLANG_URL = EngineKind("sglang-url", SglangClient, returns_experts=True)
SGLANG = EngineKind("sglang", SglangClient, _launches, options=SglangSettings, section="sglang", returns_experts=True)
