"""The adapter of uvicorn: the proxy, or another app, on a socket of this process, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from penstock.agents.proxy.api.app import ProxyApp
from penstock.agents.proxy.session import AgentProxy
from penstock.protocol.transport import http_tls

_KEEP_ALIVE_S = 600  # a tool may run for minutes between two requests; a reset in that moment is an error to the agent
_BACKLOG = 1024
_GRACE_S = 2


@contextlib.asynccontextmanager
async def serving(proxy: AgentProxy, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve the proxy inside the block; yields its URL, to which `proxy.path` is appended.

    Raises ConfigError when the address cannot be had.
    """
    async with serving_app(ProxyApp(proxy), host, port, key="the proxy's port") as url:
        yield url


@contextlib.asynccontextmanager
async def serving_at(proxy: AgentProxy, path: Path) -> AsyncIterator[None]:
    """Serve the proxy on a Unix socket inside the block, which any user may open who can enter its folder; raises OSError."""
    with _listening_at(path) as listener:
        async with _serving(ProxyApp(proxy), listener):
            yield


def _listening_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.asynccontextmanager
async def serving_app(app: object, host: str, port: int, *, key: str) -> AsyncIterator[str]:
    """Serve an ASGI app inside the block; yields its URL. Raises ConfigError, which names the setting ``key`` or the certificate."""
    listener = http_tls.listen(host, port, key=key, backlog=_BACKLOG)
    async with _serving(app, listener, **http_tls.server_options(host)):
        yield f"{http_tls.scheme(host)}://{host}:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _serving(app: object, listener: socket.socket, **tls: Any) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]  (uvicorn's types of ASGI messages are narrower)
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        **tls,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await running


class _Server(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
