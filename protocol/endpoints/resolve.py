"""Names → addresses, in a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor

_DEADLINE_S = 5.0
# A pool of their own: a name server that hangs must not block the threads of other work.
_RESOLVERS = ThreadPoolExecutor(16, thread_name_prefix="resolve")


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a name; raises OSError when it has none, or when no name server answers in time."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    except UnicodeError:  # a part of the name is empty or too long
        raise OSError(f"{host!a} is no host name") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
