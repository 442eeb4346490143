"""SGLang on a machine without a GPU: the path of its environment, and the settings its server needs.

`make sglang-env` makes the environment from ``lock.txt``: pinned releases without their dependencies' metadata,
which would pull gigabytes for CUDA. ``stubs`` holds stand-ins for three packages whose wheels are made for GPUs;
only the server's process sees them. SGLang itself is not patched. It is slow and its kernels are not those of a
GPU: it serves to test the integration and to try it out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError

PYTHON_VARIABLE = "PENSTOCK_SGLANG_PYTHON"
STUBS = Path(__file__).with_name("stubs")
_DEFAULT = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"

_MAX_TOTAL_TOKENS = 32_768  # SGLang's default would fill the machine's memory with keys and values
_MAX_RUNNING = 256
_EXTRA_ARGS = (
    "--disable-cuda-graph",
    "--sleep-on-idle",  # else a server without work takes a whole core
)


def find_python(environ: Mapping[str, str]) -> Path:
    """Return the Python of SGLang's environment; raises ConfigError with the command that makes one."""
    named = environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else _DEFAULT
    if not python.is_file():
        where = f"{PYTHON_VARIABLE} = {named} does not exist" if named else f"no environment at {python}"
        raise ConfigError(
            f"SGLang's environment: {where}; make one with `make sglang-env` (0.3 GB to download, 1.6 GB on disk), "
            f"or set {PYTHON_VARIABLE} to the python of one"
        )
    return python


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {
        "PYTHONPATH": str(STUBS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "penstock_sglang_models",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),  # more threads are many times slower on small models
    }


def section(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the ``[sglang]`` section of a run on this machine; raises ConfigError as `find_python` does."""
    return {
        "python": str(find_python(environ)),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "max_total_tokens": _MAX_TOTAL_TOKENS,
        "max_running_requests": _MAX_RUNNING,
        "extra_args": list(_EXTRA_ARGS),
        "environ": environment(environ),
    }


def section_toml() -> str:
    settings = section()
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if name != "environ"]
    lines += ["", "[sglang.environ]", *(f"{name} = {json.dumps(value)}" for name, value in settings["environ"].items())]
    return "\n".join(["[sglang]", *lines]) + "\n"
