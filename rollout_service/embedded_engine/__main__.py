"""Start the embedded engine: arguments → weights → engine thread → HTTP server. See README.md."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from penstock.rollout_service.embedded_engine.memory import keep_freed_memory
from penstock.rollout_service.embedded_engine.parent_watch import exit_with_parent
from penstock.rollout_service.embedded_engine.settings import EngineSettings, parse_arguments


def main() -> int:
    """Run until stopped; return the exit status."""
    settings = parse_arguments(sys.argv[1:])
    if settings.die_with_parent:
        exit_with_parent(settings.parent_pid)
    keep_freed_memory()
    # Set before torch is imported: OpenMP reads the variable once; without it every later thread gets its own default.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    from penstock.protocol.logs import configure  # noqa: PLC0415
    from penstock.rollout_service.embedded_engine.errors import EngineError  # noqa: PLC0415
    from penstock.rollout_service.embedded_engine.run_engine import serve  # noqa: PLC0415

    configure("embedded_engine")
    listener = socket.create_server((settings.host, settings.port))
    # asyncio sets TCP_NODELAY only on sockets that name their protocol, which this one does not. Without it a reply's
    # body waits 40 ms for the acknowledgement of its headers. Accepted sockets inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return serve(settings, listener, on_ready=lambda: _announce(settings, listener))
    except EngineError as error:
        print(f"embedded engine: {error}", file=sys.stderr)  # noqa: T201  (the result of a failed command)
        return 2


def _announce(settings: EngineSettings, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    if settings.port_file is not None:
        partial = Path(f"{settings.port_file}.{os.getpid()}")
        partial.write_text(f"{port}\n")
        partial.replace(settings.port_file)  # a reader finds the whole number or no file
    print(f"embedded engine ready on http://{settings.host}:{port}", flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
