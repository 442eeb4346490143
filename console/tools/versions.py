"""Versions of this program, of Python and of installed packages, from metadata: nothing is imported for them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator


def installed_versions() -> Iterator[tuple[str, str]]:
    yield "penstock", package_version("penstock") or "(not installed: run from its folder)"
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    for name in ("torch", "deepspeed", "transformers", "nats-py", "minio", "pydantic"):
        yield name, package_version(name) or "(not installed)"


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
