"""A proxy for the real S3 server that can refuse or delay writes, and answers parts as S3 does."""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from penstock.protocol.config.connection import S3Settings
from tests.json_server import Handler, HttpServer

_BODY = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"


class RefusingS3(HttpServer):
    """Forwards all requests; while ``refusal`` is set, writes are answered with that status and S3 error code.

    Writes wait until ``gate`` is set, as it is at first. ``only`` limits both to keys that end so.
    """

    def __init__(self, behind: S3Settings) -> None:
        """Use as a context manager; ``settings`` lead through the proxy."""
        self.refusal: tuple[int, str] | None = None
        self.num_refused = self.num_gets = self.num_held = 0
        self.says_partial = False  # 206 for a part, for which the real server answers 200
        self.only = ""
        self.gate = threading.Event()
        self.gate.set()
        upstream = urlsplit(behind.endpoint).netloc
        proxy = self

        class Proxy(Handler):
            def serve(self) -> None:
                body = self.body()
                writes = self.command in {"PUT", "POST", "DELETE"} and urlsplit(self.path).path.endswith(proxy.only)
                if writes and not proxy.gate.is_set():
                    proxy.num_held += 1
                    proxy.gate.wait(60.0)
                if proxy.refusal is not None and writes:
                    proxy.num_refused += 1
                    status, code = proxy.refusal
                    self.answer(status, _BODY.format(code=code).encode(), {"Content-Type": "application/xml"})
                    return
                status, data, headers = self.answer_of(upstream, body, dict(self.headers))
                proxy.num_gets += self.command == "GET"
                is_part = proxy.says_partial and status == 200 and "Content-Range" in headers
                self.answer(206 if is_part else status, data, headers)

        super().__init__(Proxy)
        self.settings = behind.model_copy(update={"endpoint": self.url})
