"""A small HTTP server for ``/metrics`` in its own thread: a scrape never waits for the service or delays it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import re
import socket
from collections.abc import Callable

import structlog

from penstock.protocol.transport import tls
from penstock.protocol.transport.loop_thread import LoopThread

log = structlog.get_logger("metrics")

_REQUEST_S = 5.0  # for the request to arrive, and again for the answer to be taken
_MAX_HEAD_BYTES = 16 * 1024
_MAX_CLIENTS = 16  # at a time; another one takes the place of the oldest
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})

Page = Callable[[str], tuple[bytes, str]]  # from an Accept header to a body and its content type
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]@/]*)(?::[0-9]{1,5})?")


class MetricsServer:
    def __init__(self, host: str, port: int, page: Page, *, key: str) -> None:
        """Listen at once; raises ConfigError, which names the setting ``key``, when the address cannot be used."""
        self._page = page
        self._socket = tls.listen(host, port, key=f"metrics.{key}", backlog=_MAX_CLIENTS)
        files = tls.server_files(host)
        self._tls = None if files is None else files.context()
        address, bound = self._socket.getsockname()[:2]
        self._hosts = LOOPBACK_NAMES if ipaddress.ip_address(address).is_loopback else None
        self.url = metrics_url(address, bound)
        self._thread: LoopThread | None = None
        self._stop = asyncio.Event()
        self._clients: dict[asyncio.Task[None], None] = {}  # the oldest first

    def __enter__(self) -> MetricsServer:
        self._thread = LoopThread("metrics")
        self._serving = self._thread.start(self._serve())
        log.info("metrics", url=self.url)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._thread.loop.call_soon_threadsafe(self._stop.set)
        ended = concurrent.futures.wait([self._serving], _REQUEST_S).done
        self._thread.stop()
        if ended and (err := self._serving.exception()) is not None:
            log.error("the server of /metrics failed", url=self.url, error=str(err))

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._answer,
            sock=self._socket,
            limit=_MAX_HEAD_BYTES,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _REQUEST_S,
        )
        await self._stop.wait()
        # Not closed before the last client is: asyncio does not close the socket of one that it is accepting just then.
        asyncio.get_running_loop().remove_reader(self._socket)
        for client in self._clients:
            client.cancel()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # clients, and those that were just accepted
            await asyncio.wait(others)
        server.close()
        await asyncio.sleep(0)  # the clients' transports close in the loop's next turn

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.current_task()
        assert client is not None
        self._clients[client] = None
        if len(self._clients) > _MAX_CLIENTS:
            self._clients.pop(oldest := next(iter(self._clients)))
            oldest.cancel()
        writer.transport.set_write_buffer_limits(0)  # an answer is taken when nothing of it is left here
        try:
            if self._stop.is_set():
                return
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = self._response(head.decode("latin-1"))
            async with asyncio.timeout(_REQUEST_S):
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # the client's failure: what it did not take is not kept for it
        except asyncio.CancelledError:
            writer.transport.abort()  # the service stops, or others wait; the callback would log an error
        finally:
            self._clients.pop(client, None)
            writer.close()

    def _response(self, head: str) -> bytes:
        lines = head.split("\r\n")
        fields = [line.partition(":") for line in lines[1:]]
        headers = {name.lower(): value.strip() for name, _, value in fields}
        num_hosts = sum(name.strip().lower() == "host" for name, _, _ in fields)
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if self._hosts is not None and (num_hosts != 1 or host_of(headers.get("host", "")) not in self._hosts):
            # A web page in a browser of this machine, whose name resolves to loopback.
            return _message("403 Forbidden", b"the Host header must be localhost or 127.0.0.1\n")
        if path != "/metrics":
            return _message("404 Not Found", b"see /metrics\n")
        if method not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", b"use GET\n")
        try:
            body, content_type = self._page(headers.get("accept", ""))
        except Exception:
            log.exception("the metrics could not be written")
            return _message("500 Internal Server Error", b"the metrics could not be written; see the log\n")
        return _message("200 OK", body, content_type, with_body=method == "GET")


def metrics_url(host: str, port: int) -> str:
    scheme = tls.scheme(host)
    if host in ("0.0.0.0", "::"):  # noqa: S104  what was configured
        host = socket.gethostname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def _message(
    status: str, body: bytes, content_type: str = "text/plain; charset=utf-8", *, with_body: bool = True
) -> bytes:
    fields = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode("latin-1") + (body if with_body else b"")


def host_of(host: str) -> str:
    """Return the name in a Host header, without its port; what is no name and port is returned whole."""
    match = _HOST.fullmatch(host.lower())
    return match[1] if match else host
