"""HTTP servers of tests: threads on the loopback, which answer JSON or what another server answers."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Self

_HOPS = {"Connection", "Transfer-Encoding", "Keep-Alive"}
Answer = tuple[int, bytes, Mapping[str, str]]  # status, body, headers


class Handler(BaseHTTPRequestHandler):
    """Calls `serve` for each request, and logs none."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for headers and body: two would wait for each other's acknowledgement

    def serve(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  the names of http.server

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_of(self, server: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Return what another server, ``host:port``, answers to this request."""
        connection = http.client.HTTPConnection(server, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(headers))
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        kept = {name.title(): value for name, value in reply.getheaders() if name.title() not in _HOPS}
        return reply.status, data, kept

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what a handler raises, but for connections that their client ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class HttpServer:
    """One server, which runs from its construction on until `close`. Use as a context manager."""

    def __init__(
        self, handler: type[Handler], *, host: str = "127.0.0.1", port: int = 0, kind: type[Threads] = Threads
    ) -> None:
        self._server = kind((host, port), handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

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


class JsonServer(HttpServer):
    """A server whose subclass answers, with ``headers`` in every answer; a fake of an engine is one."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        """Start to serve: call it at the end of a subclass's ``__init__``."""
        owner = self

        class JsonHandler(Handler):
            def serve(self) -> None:
                data = self.body()
                status, value = owner.answer(self.command, self.path, json.loads(data) if data else None, self.headers)
                self.answer(status, value if isinstance(value, bytes) else json.dumps(value).encode(), owner.headers)

        super().__init__(JsonHandler)

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        raise NotImplementedError
