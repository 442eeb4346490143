"""Serve the proxy on a socket of this process, in its event loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.agents.proxy.api.app import ProxyApp
from penstock.agents.proxy.session import AgentProxy
from penstock.serving import web_server
from penstock.serving.web_server import LONG_BACKLOG


@contextlib.asynccontextmanager
async def serving(proxy: AgentProxy, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve the proxy inside the block; yields its URL, to which `proxy.path` is appended.

    Raises ConfigError when the address cannot be had.
    """
    async with web_server.serving_app(ProxyApp(proxy), host, port, key="the proxy's port") as url:
        yield url


@contextlib.asynccontextmanager
async def serving_at(proxy: AgentProxy, path: Path) -> AsyncIterator[None]:
    """Serve the proxy on a Unix socket inside the block, which any user may open who can enter its folder; raises OSError."""
    with _listening_at(path) as listener:
        async with web_server.serving_long(ProxyApp(proxy), listener):
            yield


def _listening_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(LONG_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
