"""The MCP server of `tool_server.py` at a URL, on a thread of the test."""

from __future__ import annotations

import threading
from typing import Any

from tests.servers import wait_for


class ServedTools:
    """Serves until it is stopped; ``options`` are those of uvicorn, for TLS."""

    def __init__(self, **options: Any) -> None:
        import uvicorn
        from tests.agents.environments.adapters.tool_server import server

        config = uvicorn.Config(server.streamable_http_app(), port=0, log_level="critical", ws="none", **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started, "the MCP server's start")
        scheme = "https" if options else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/mcp"

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(60.0)
