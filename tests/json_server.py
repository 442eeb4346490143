"""An HTTP server on the loopback that answers JSON, in threads; a fake of an engine subclasses it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Self


class JsonServer:
    """One server on a free port, with ``headers`` in every answer. Use as a context manager."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        """Start to serve: call it at the end of a subclass's ``__init__``."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet for headers and body: two would wait for each other's acknowledgement

            def do_GET(self) -> None:
                self._answer("GET", None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                self._answer("POST", json.loads(data) if data else None)

            def _answer(self, method: str, body: Any) -> None:
                status, value = owner.answer(method, self.path, body, self.headers)
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                try:
                    self.send_response(status)
                    for name, text in {"content-length": str(len(data)), **owner.headers}.items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(data)
                    self.wfile.flush()
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_until_closed(self) -> None:
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
