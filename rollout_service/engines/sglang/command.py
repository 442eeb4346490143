"""How a worker starts a SGLang server of its own: the command line and the environment; pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_process import LaunchCommand
from penstock.rollout_service.engines.sglang.settings import SglangSettings

_TETHER = Path(__file__).parents[1] / "parent_death.py"
_NOT_THEIRS = ("PYTHON", "PENSTOCK_", "VIRTUAL_ENV")  # our imports, our passwords, our environment


def sglang_command(settings: SglangSettings, number: int = 0) -> LaunchCommand:
    """Return how server ``number`` of a worker is started."""

    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        program = settings.command or (str(settings.python or sys.executable), "-m", "sglang.launch_server")
        return [
            *(sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(port_file)),
            *program,
            *("--model-path", str(folder), "--weight-version", str(version)),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *_flags(settings, number),
        ]

    return command


def sglang_environ(settings: SglangSettings, ours: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: ours without what belongs to this program, and what the settings add.

    The server imports nothing from our working directory: PYTHONSAFEPATH is ``-P``, which a Python 3.10 does not know.
    """
    passed = {name: value for name, value in ours.items() if not name.startswith(_NOT_THEIRS)}
    return passed | {"PYTHONSAFEPATH": "1"} | settings.environ


def _flags(settings: SglangSettings, number: int) -> list[str]:
    # Updates are refused by a server whose own load format is a dummy's; one tokenizer process knows the version;
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
        # strict: an adapter's tensor that no layer takes would be left out in silence
        flags += ["--enable-lora", "--lora-strict-loading", "--lora-target-modules", *settings.lora_target_modules]
    if number:
        flags += ["--base-gpu-id", str(number * (settings.gpus_per_engine or settings.tp_size * settings.dp_size))]
    return [*flags, *settings.extra_args]
