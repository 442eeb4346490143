"""The adapter of uvicorn: serve an app on a socket that is already bound, so that the number for port 0 is known."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from penstock.protocol.errors import ConfigError

_GRACE_S = 2  # requests in progress at shutdown get this long


def listen(host: str, port: int, *, key: str) -> socket.socket:
    """Bind a socket; raises ConfigError naming the setting ``key`` when the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(256)
        except OSError:
            bound.close()
            raise
    except OSError as err:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({err.strerror or err}); set {key} to a free port, or to 0"
        ) from None
    return bound


async def serve(app: FastAPI, bound: socket.socket, done: asyncio.Event) -> None:
    """Answer requests until ``done``."""
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S)
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
