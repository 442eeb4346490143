"""A proxy for the real S3 server that can refuse or delay writes, and answers parts as S3 does."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from penstock.protocol.config.connection import S3Settings

_BODY = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
_HOPS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class RefusingS3:
    """Forwards all requests; while ``refusal`` is set, writes are answered with that status and S3 error code.

    Writes wait until ``gate`` is set, as it is at first. ``only`` limits both to keys that end so.
    """

    def __init__(self, behind: S3Settings) -> None:
        """Use as a context manager; ``settings`` lead through the proxy."""
        self.refusal: tuple[int, str] | None = None
        self.num_refused = 0
        self.num_gets = 0
        self.says_partial = False  # 206 for a part, for which the real server answers 200
        self.only = ""
        self.gate = threading.Event()
        self.gate.set()
        self.num_held = 0
        upstream = urlsplit(behind.endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                writes = self.command in {"PUT", "POST", "DELETE"} and urlsplit(self.path).path.endswith(proxy.only)
                if writes and not proxy.gate.is_set():
                    proxy.num_held += 1
                    proxy.gate.wait(60.0)
                if proxy.refusal is not None and writes:
                    proxy.num_refused += 1
                    status, code = proxy.refusal
                    self._answer(status, _BODY.format(code=code, message="no").encode(), "application/xml")
                    return
                connection = http.client.HTTPConnection(upstream, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers))
                reply = connection.getresponse()
                data = reply.read()
                proxy.num_gets += self.command == "GET"
                is_part = proxy.says_partial and reply.status == 200 and reply.getheader("Content-Range") is not None
                self.send_response(206 if is_part else reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in _HOPS:
                        self.send_header(name, value)
                length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                connection.close()

            def _answer(self, status: int, data: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.settings = behind.model_copy(update={"endpoint": f"http://127.0.0.1:{self._server.server_address[1]}"})

    def __enter__(self) -> RefusingS3:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
