"""The embedded engine as a kind of engine: a child process whose HTTP API is SGLang's (`rollout_service.embedded_engine`)."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.embedded_engine.process import KEY_VARIABLE
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.engine_process import LaunchCommand
from penstock.rollout_service.engines.sglang.client import SglangClient

_PROGRAM = (sys.executable, "-P", "-m", "penstock.rollout_service.embedded_engine")
PREPARE = (*_PROGRAM, "--prepare")


class EmbeddedOptions(Protocol):
    """The settings of the ``worker`` section that the embedded engine takes."""

    max_running: int  # sequences decoded at once
    kept_tokens: int | None  # tokens kept in the prefix cache; None: as many as fit into 512 MiB
    device: str
    dtype: Literal["float32", "bfloat16"]


class EmbeddedClient(SglangClient):
    """A client of the embedded engine, whose ``/generate`` has one field more than SGLang's."""

    takes_image_positions = True


def embedded_command(options: EmbeddedOptions) -> LaunchCommand:

    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        return [
            *_PROGRAM,
            *("--model-path", str(folder)),
            *("--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)),
            *("--max-running", str(options.max_running)),
            *(() if options.kept_tokens is None else ("--max-kept-tokens", str(options.kept_tokens))),
            *("--device", options.device, "--dtype", options.dtype),
            *("--weight-version", str(version)),
            *("--die-with-parent", "--parent-pid", str(os.getpid())),
        ]

    return command


def _launches(options: EmbeddedOptions, environ: Mapping[str, str]) -> list[ServerLaunch]:
    key = secrets.token_urlsafe(32)  # else any program and web page of this machine could change the weights
    environment = {**environ, KEY_VARIABLE: key}
    return [ServerLaunch(embedded_command(options), "engine.log", environment, prepare=PREPARE, api_key=key)]


EMBEDDED = EngineKind(
    "embedded", EmbeddedClient, _launches, section="worker", long_mode="in_place", returns_experts=True
)
