"""Start the embedded engine: arguments → weights → engine thread → HTTP server. See README.md.

With ``--prepare`` alone it imports everything first, and reads its arguments from stdin as a JSON line.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from penstock.protocol.files import atomic_write
from penstock.rollout_service.embedded_engine.process import (
    KEY_VARIABLE,
    EngineSettings,
    exit_with_parent,
    keep_freed_memory,
    parse_arguments,
)

_DEFAULT_THREADS = EngineSettings.model_fields["threads"].default


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--prepare"]:
        arguments = _prepared()
        if arguments is None:
            return 0
    settings = parse_arguments(arguments)
    if settings.die_with_parent:
        exit_with_parent(settings.parent_pid)
    keep_freed_memory()
    # Set before torch is imported: OpenMP reads the variable once; without it every later thread gets its own default.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    from penstock.protocol.errors import ConfigError  # noqa: PLC0415
    from penstock.protocol.logs import configure  # noqa: PLC0415
    from penstock.protocol.process_end import error_text  # noqa: PLC0415
    from penstock.protocol.transport import tls  # noqa: PLC0415
    from penstock.rollout_service.embedded_engine.errors import EngineError  # noqa: PLC0415
    from penstock.rollout_service.embedded_engine.run_engine import serve  # noqa: PLC0415

    configure("embedded_engine")
    try:
        listener = tls.listen(settings.host, settings.port, key="--port")
        key = os.environ.pop(KEY_VARIABLE, "")
        return serve(settings, listener, on_ready=lambda: _announce(settings, listener), key=key)
    except (EngineError, ConfigError) as error:
        sys.stderr.write(error_text(f"embedded engine: {error}\n"))
        return 2


def _prepared() -> list[str] | None:
    """Import what `main` needs and return the arguments from stdin; None when whoever started this process has exited."""
    keep_freed_memory()
    os.environ["OMP_NUM_THREADS"] = str(_DEFAULT_THREADS)  # read once, by the import of torch
    import penstock.rollout_service.embedded_engine.run_engine  # noqa: F401, PLC0415

    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _announce(settings: EngineSettings, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    if settings.port_file is not None:
        atomic_write(settings.port_file, f"{port}\n")
    from penstock.protocol.transport import tls  # noqa: PLC0415  after OMP_NUM_THREADS is set

    scheme = tls.scheme(settings.host)
    print(f"embedded engine ready on {scheme}://{settings.host}:{port}", flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
