"""Describes what the weights of a step depend on besides groups and settings: libraries, code, machine, threads."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

_LIBRARIES = ("torch", "deepspeed", "transformers", "numpy")
_PACKAGES = ("trainer", "protocol")  # their code computes the numbers
THREADS = "threads"
_ROWS = "rows"
_BEFORE = {_ROWS: "padded"}  # in records without the key: the sums of a step are in another order, equal up to rounding


def environment_fingerprint(extensions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Describe this process; equal descriptions give the same bits on a CPU, for the same groups and settings.

    ``extensions`` are the digests of user code that the settings choose (`AlgorithmSettings.extension_digests`).
    """
    return {
        **{name: _version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "code": _code_digest(),
        "machine": _machine(),
        THREADS: str(torch.get_num_threads()),
        _ROWS: "packed, prefixes once",
        **(extensions or {}),
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one line per key of ``then`` whose value is another one now."""
    then = {**_BEFORE, **then} if then else then
    return [
        f"{name}: {then[name]} then, {now.get(name, 'unknown')} now" for name in then if then[name] != now.get(name)
    ]


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


@functools.cache
def _code_digest() -> str:
    """Return 16 hex digits that change with any line of the packages that compute a step."""
    root, digest = Path(__file__).absolute().parents[2], hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _machine() -> str:
    """Return the accelerator's name, or the processor's with the instructions that torch uses on it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.processor() or platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"
