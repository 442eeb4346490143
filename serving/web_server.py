"""What a process that serves HTTP needs: uvicorn on a socket that is bound already, Host names and heap.

A client that sends a request slowly, or half of it, keeps a connection and memory for as long as it likes; some hundred
of them keep everybody else out. Every request gets `GRACE_S` seconds, and more while its bytes arrive at
`MIN_BYTES_PER_S` or faster; one that does not arrive in time is answered 408 and its connection is closed. A client
that does not take its answer has the same time, and then its connection is reset: a closed one with unsent bytes would
stay. Above the limit of connections the one that waits longest for its client is closed, so that connections that send
nothing keep nobody out; another machine has three quarters of the limit at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import urlsplit

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.protocol.transport import tls

GRACE_S = 10.0  # a request's headers and a small body, over any network
MIN_BYTES_PER_S = 32_000  # 16 MiB may take about nine minutes
MAX_CONNECTIONS = 512  # below the 1,024 files that a process may open by default
LONG_IDLE_S = 600  # a tool may run for minutes between two requests; a reset in that moment is an error to the agent
MANY_CONNECTIONS = 16_384  # of workers and agents, each of which keeps those that it made
LONG_BACKLOG = 1024  # hundreds of agents connect in one moment
_M_ARENA_MAX = -8  # of malloc.h
log = structlog.get_logger("reward_service.web_server")
_SHUTDOWN_S = 2  # requests in progress at shutdown get this long
_BACKLOG = 256
_IDLE_S = 5  # between two requests of a connection
_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"


def use_one_heap() -> bool:
    """Let all threads allocate from one heap; returns False where the C library has no such option.

    Packs are read and scored in a pool of threads. With a heap for each, what one thread frees stays in its heap while
    another asks the kernel for more: the process grew by 270 bytes a pack between the 8,000th and the 15,000th, with
    one heap by 5. The interpreter's lock lets one thread allocate at a time, so threads hardly wait for the heap.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return mallopt(_M_ARENA_MAX, 1) == 1


def allowed_hosts(host: str, url: str | None, secrets: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names besides those of the loopback that a Host header may have; None: any.

    Without ``secrets``, a server on the loopback ``host`` trusts the programs of its machine, and no web page whose
    name resolves to it. ``url`` is where it is reached, if that is not the loopback: behind a proxy or a tunnel.
    """
    if secrets or not tls.is_loopback(host):
        return None
    name = urlsplit(url or "").hostname
    return (name,) if name else ()


class RequestClock:
    """The time since a connection's current request began to arrive; none while a whole request is worked on. Pure.

    Clock readings are seconds of one monotonic clock.
    """

    def __init__(self, now: float, idle_s: float = 0.0) -> None:
        """Await a request, whose time begins now; ``idle_s`` seconds later at most, with its first byte."""
        self.since: float | None = now
        self._idle_s = idle_s
        self._num_bytes = 0

    def arrived(self, now: float, num_bytes: int) -> None:
        if self.since is None or (self._idle_s and not self._num_bytes):
            self.since, self._num_bytes = now, 0
        self._num_bytes += num_bytes

    def complete(self) -> None:
        self.since = None

    def left_s(self, now: float) -> float:
        """Return the seconds until the request is late; 0.0 or less when it is, infinity while none is awaited."""
        if self.since is None:
            return float("inf")
        idle_s = 0.0 if self._num_bytes else self._idle_s
        return self.since + idle_s + GRACE_S + self._num_bytes / MIN_BYTES_PER_S - now


async def serve(app: object, bound: socket.socket, done: asyncio.Event) -> None:
    """Answer requests until ``done``; with TLS where ``bound`` listens on more than the loopback (`tls`).

    Raises ConfigError for a certificate that cannot be used.
    """
    async with serving(app, bound, **tls.server_options(bound.getsockname()[0])) as running:
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()


@contextlib.asynccontextmanager
async def serving_app(app: object, host: str, port: int, *, key: str) -> AsyncIterator[str]:
    """Serve an ASGI app to workers or agents inside the block; yields its URL.

    Raises ConfigError, which names the setting ``key`` or the certificate.
    """
    tls_options = tls.server_options(host)
    with tls.listen(host, port, key=key, backlog=LONG_BACKLOG) as bound:
        async with serving_long(app, bound, **tls_options):
            yield f"{tls.scheme(host)}://{host}:{bound.getsockname()[1]}"


def serving_long(app: object, bound: socket.socket, **options: Any) -> AbstractAsyncContextManager[asyncio.Task[None]]:
    """Return `serving` for clients that keep many connections for long: workers and agents."""
    limits = {"idle_s": LONG_IDLE_S, "max_connections": MANY_CONNECTIONS, "backlog": LONG_BACKLOG}
    return serving(app, bound, **limits, date_header=False, **options)


@contextlib.asynccontextmanager
async def serving(
    app: object, bound: socket.socket, *, idle_s: int = _IDLE_S, max_connections: int | None = None,
    backlog: int = _BACKLOG, **options: Any,
) -> AsyncIterator[asyncio.Task[None]]:  # fmt: skip
    """Answer requests inside the block; yields the task, which ends before the block only if the server fails.

    Args:
        app: An ASGI app.
        bound: A socket that listens.
        idle_s: Seconds that a connection may wait for its next request.
        max_connections: The limit of connections; None: `MAX_CONNECTIONS`.
        backlog: How many connections are accepted at once; their requests are read afterwards.
        options: Further options of `uvicorn.Config`.
    """
    server = Server(
        config_of(app, idle_s=idle_s, max_connections=max_connections, backlog=backlog, lifespan="off", **options)
    )
    running = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield running
    finally:
        server.should_exit = True
        await running


def config_of(
    app: object, *, idle_s: int = _IDLE_S, max_connections: int | None = None, backlog: int = _BACKLOG, **options: Any
) -> uvicorn.Config:
    """Return the configuration of every server of Penstock; the arguments are those of `serving`."""
    config = _Config(
        app,  # pyright: ignore[reportArgumentType]  (uvicorn's types of ASGI messages are narrower)
        http=_BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=backlog,
        timeout_keep_alive=idle_s,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        **options,
    )
    config.max_connections = MAX_CONNECTIONS if max_connections is None else max_connections
    config.num_of_client = Counter()
    return config


class _Config(uvicorn.Config):
    max_connections: int
    num_of_client: Counter[str]  # connections, by address


class Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedProtocol(H11Protocol):
    """One connection, with a limit on the time that its client takes to send a request."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.clock = RequestClock(self.loop.time())
        self._idle_s = max(0, self.config.timeout_keep_alive - _IDLE_S)
        self._limits: _Config = self.config  # pyright: ignore[reportAttributeAccessIssue]
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits.num_of_client[self._address] += 1
        if self._is_crowded() and not self._make_room():
            self._end(_FULL, "all connections of this service are in use; try again")
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        self.clock.arrived(self.loop.time(), len(data))
        super().data_received(data)
        self._await_request(anew=self._is_idle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The client may still send a body that nobody reads, or a part of the next request.
        self._await_request(anew=True)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._await_request(anew=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_request(anew=True)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._limits.num_of_client[self._address] -= 1
        super().connection_lost(exc)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _has_too_many(self) -> bool:
        limit = 3 * self._limits.max_connections // 4
        return self._limits.num_of_client[self._address] > limit and not tls.is_loopback(self._address)

    def _is_crowded(self) -> bool:
        return len(self.connections) > self._limits.max_connections or self._has_too_many()

    @property
    def has_request(self) -> bool:
        """Whether the service works for the client, and waits for neither its request nor its taking of an answer."""
        cycle = None if self.flow.write_paused else self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _await_request(self, *, anew: bool) -> None:
        if self.has_request:
            self.clock.complete()
            return
        now = self.loop.time()
        if anew:
            self.clock = RequestClock(now, self._idle_s)
        if self._timer is None or self._timer.when() > now + self.clock.left_s(now):  # a request began
            self._watch()

    def _make_room(self) -> bool:
        """Close the connection that waited longest, of a client with too many its own; False when all are worked on."""
        of_client = self._address if self._has_too_many() else None
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, _BoundedProtocol)
            and connection is not self
            and of_client in (None, connection._address)
        ]
        waiting = [connection for connection in others if not connection.has_request]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda one: one.clock.since or 0.0)
        oldest.connections.discard(oldest)  # closing takes until the loop's next turn
        oldest._end(_FULL, "closed for another connection: no whole request had arrived")
        return True

    def _watch(self) -> None:
        """Come again when the request in arrival, or the taking of an answer, would be late; end a late connection."""
        if self.flow.write_paused:
            num_unsent = self.transport.get_write_buffer_size()
            self.clock.arrived(self.loop.time(), self._num_unsent - num_unsent)
            self._num_unsent = num_unsent
        left_s = self.clock.left_s(self.loop.time())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if left_s == float("inf"):
            return
        if left_s > 0.0:
            self._timer = self.loop.call_later(left_s, self._watch)
            return
        log.debug("request did not arrive, or answer was not taken, in time", client=self.client)
        self._end(_LATE, "the request did not arrive in time")

    def _end(self, head: bytes, detail: str) -> None:
        if self.transport.get_write_buffer_size():  # `close` would wait for the client to take it
            self.transport.abort()
            return
        begun = self.conn.their_state is h11.IDLE and not self._is_idle
        if begun or (self.cycle is not None and not self.cycle.response_started):
            body = f'{{"detail":"{detail}"}}'.encode()
            self.transport.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
