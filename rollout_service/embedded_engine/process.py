"""The engine's process: its command line, with SGLang's names where SGLang has them, and what is set before torch is imported.

It exits with its parent, and keeps freed memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.protocol.command_line import FLAT, application
from penstock.protocol.parent_death import end_with_parent

KEY_VARIABLE = "PENSTOCK_ENGINE_KEY"  # whose value requests must have as their bearer token
_POLL_S = 0.5
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_HEAP_BLOCK_BYTES = 32 * 2**20  # glibc's upper limit for the threshold
_KEPT_BYTES = 256 * 2**20


def exit_with_parent(parent: int | None = None) -> None:
    """Have this process killed with SIGKILL when its parent exits.

    ``parent`` is the parent's process id as the parent itself passed it: if the parent has exited before this call, the
    kernel has assigned this process another one. None: the present parent.

    The kernel's signal is sent when the *thread* that started this process ends, and exists on Linux only. Polling the
    parent's id covers other systems and the exit of the process.
    """
    parent = os.getppid() if parent is None else parent
    end_with_parent(parent)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds; return False, changing nothing, where the C library has none."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _LARGEST_HEAP_BLOCK_BYTES),
    )
    return all(mallopt(option, value) == 1 for option, value in wanted)


class EngineSettings(BaseModel):
    """Settings of one engine process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: Annotated[Path, Field(description="Hugging Face model folder to serve first")]
    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 30000
    port_file: Annotated[Path | None, Field(description="file that receives the port once requests are served")] = None
    max_running: Annotated[int, Field(ge=1, description="sequences that decode together")] = 256
    max_total_tokens: Annotated[
        int | None, Field(ge=1, description="tokens the KV cache holds; default: as many as fit into 2 GiB")
    ] = None
    max_prefill_tokens: Annotated[int, Field(ge=1, description="prompt tokens computed in one pass")] = 8192
    max_kept_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            description="tokens whose keys and values are kept for sequences that begin alike; 0: none; default: as many as fit "
            "into 512 MiB",
        ),
    ] = None
    device: Annotated[str, Field(description="torch device: cpu, cuda, cuda:1")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"], Field(description="dtype of weights and KV cache")] = "float32"
    max_lora_rank: Annotated[int, Field(ge=1, description="largest rank of an adapter")] = 256
    max_loaded_loras: Annotated[int, Field(ge=1, description="adapters that are loaded at once")] = 64
    weight_version: Annotated[str, Field(description="label of the first weights")] = "default"
    served_model_name: Annotated[str | None, Field(description="name in /model_info; default: model_path")] = None
    threads: Annotated[int, Field(ge=1, description="CPU threads of one operation")] = 1
    die_with_parent: Annotated[bool, Field(description="exit when the process that started this one exits")] = False
    parent_pid: Annotated[
        int | None, Field(description="id of that process, in case it exits while this one starts")
    ] = None


def parse_arguments(arguments: Sequence[str]) -> EngineSettings:
    """Turn ``--kebab-case value`` arguments into settings; explains errors on stderr and exits with 2."""
    app = application("python -m penstock.rollout_service.embedded_engine")

    @app.default
    def settings(*, engine_settings: Annotated[EngineSettings, FLAT]) -> EngineSettings:
        return engine_settings

    settings_or_help = app(arguments, result_action="return_value")
    if settings_or_help is None:
        raise SystemExit(0)
    return settings_or_help
