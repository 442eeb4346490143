"""How a worker starts the embedded engine: the command line; pure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Protocol

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_process import LaunchCommand

_PROGRAM = (sys.executable, "-P", "-m", "penstock.rollout_service.embedded_engine")
PREPARE = (*_PROGRAM, "--prepare")


class EmbeddedOptions(Protocol):
    """The settings of the ``worker`` section that the embedded engine takes."""

    @property
    def max_running(self) -> int:
        """Sequences decoded at once."""
        ...

    @property
    def kept_tokens(self) -> int | None:
        """Tokens kept for prompts that begin with them; None: as many as fit into 512 MiB."""
        ...

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        ...

    @property
    def dtype(self) -> str:
        """``float32`` or ``bfloat16``."""
        ...


def embedded_command(options: EmbeddedOptions) -> LaunchCommand:
    """Return how the embedded engine is started."""

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
