"""The listening sockets of HTTP servers: bound before the server starts, so that the number for port 0 is known."""

from __future__ import annotations

import socket

from penstock.protocol.errors import ConfigError


def listen(host: str, port: int, *, key: str, backlog: int) -> socket.socket:
    """Return a bound socket that listens, for `asyncio`; at most ``backlog`` connections wait to be accepted.

    Raises ConfigError naming the setting ``key`` when the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named. With it on, the body of an answer waits
        # about 40 ms for the acknowledgement of its headers.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(backlog)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as err:  # the second one for a host that no name can be
        reason = (err.strerror if isinstance(err, OSError) else "") or err
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason}); set {key} to a free port, or to 0"
        ) from None
    return bound
