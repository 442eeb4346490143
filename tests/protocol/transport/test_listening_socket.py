"""Listening sockets: answers leave at once, and an address that cannot be had names its setting."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.tls import listen


def test_connections_send_without_waiting_for_acknowledgements() -> None:
    """Under asyncio, Nagle's algorithm is off on the connections that the socket accepts."""

    async def nodelay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0, key="port", backlog=4) as bound:
            port = bound.getsockname()[1]
            async with await asyncio.start_server(accepted, sock=bound):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.timeout(60):
                    result = await found
                writer.close()
        return result

    assert asyncio.run(nodelay()) != 0


def test_an_address_in_use_names_the_setting() -> None:
    """The error has host, port and reason, and says what to set."""
    with listen("127.0.0.1", 0, key="x.port", backlog=4) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port} \(.*in use\); set x\.port to"
        ):
            listen("127.0.0.1", port, key="x.port", backlog=4)
