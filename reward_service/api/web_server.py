"""The adapter of uvicorn: serve an app on a socket that is already bound, so that the number for port 0 is known.

A connection whose request does not arrive in time is answered 408 and closed. Above `MAX_CONNECTIONS` the one that
waits longest for its client is closed, so that connections that send nothing keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.protocol.transport import http_tls
from penstock.reward_service.api.request_clock import MAX_CONNECTIONS, RequestClock

log = structlog.get_logger("reward_service.web_server")

_GRACE_S = 2  # requests in progress at shutdown get this long
_BACKLOG = 256
_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"


def listen(host: str, port: int, *, key: str) -> socket.socket:
    """Bind a socket; raises ConfigError naming the setting ``key`` when the address cannot be had."""
    return http_tls.listen(host, port, key=key, backlog=_BACKLOG)


async def serve(app: FastAPI, bound: socket.socket, done: asyncio.Event) -> None:
    """Answer requests until ``done``; with TLS where ``bound`` listens on more than the loopback (`http_tls`).

    Raises ConfigError for a certificate that cannot be used.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=_BoundedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
            **http_tls.server_options(bound.getsockname()[0]),
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    waiting = asyncio.create_task(done.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """Leaves signals to the process it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedProtocol(H11Protocol):
    """One connection, with a limit on the time that its client takes to send a request."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.clock = RequestClock(self.loop.time())
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            self._end(_FULL, "all connections of this service are in use; try again")
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        self.clock.arrived(self.loop.time(), len(data))
        super().data_received(data)
        if self.has_request:
            self.clock.complete()
        else:
            self._await_request(anew=self._is_idle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.has_request:  # the client may still send a body that nobody reads, or a part of the next request
            self._await_request(anew=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def has_request(self) -> bool:
        """True while a request that arrived whole is worked on."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """True while no byte of the next request has arrived."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _await_request(self, *, anew: bool) -> None:
        if anew:
            self.clock = RequestClock(self.loop.time())
        if self._timer is None:
            self._watch()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; False when all are worked on."""
        others = [one for one in self.connections if isinstance(one, _BoundedProtocol) and one is not self]
        waiting = [one for one in others if not one.has_request]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda one: one.clock.since or 0.0)
        oldest.connections.discard(oldest)  # closing takes until the loop's next turn
        oldest._end(_FULL, "closed for another connection: no whole request had arrived")
        return True

    def _watch(self) -> None:
        """Come again when the request in arrival would be late; end the connection when it is."""
        left_s = self.clock.left_s(self.loop.time())
        self._timer = None
        if left_s == float("inf") or self.transport.is_closing():
            return
        if left_s > 0.0:
            self._timer = self.loop.call_later(left_s, self._watch)
            return
        log.debug("request did not arrive in time", client=self.client)
        self._end(_LATE, "the request did not arrive in time")

    def _end(self, head: bytes, detail: str) -> None:
        """Close the connection, with an answer if its client has begun a request and got none."""
        begun = self.conn.their_state is h11.IDLE and not self._is_idle
        if begun or (self.cycle is not None and not self.cycle.response_started):
            body = f'{{"detail":"{detail}"}}'.encode()
            self.transport.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
