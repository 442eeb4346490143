"""Wait for a place at one of the servers of an environment."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from penstock.agents.environments.over_http.servers import Server, Servers


async def take_place(servers: Servers, ends: float) -> Server | None:
    """Return a server, of which a place is taken (``running``); None if there is none by the time ``ends``.

    Those who wait get a place in the order in which they came.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ends - time.monotonic()), servers.turn:
            while True:
                now = time.monotonic()
                server = servers.choose(now)
                if server is not None:
                    server.running += 1
                    return server
                wait_s = max(servers.ready_in_s(now), 0.01) * random.uniform(1.0, 1.2)  # noqa: S311 - not a secret
                await asyncio.sleep(wait_s)
    return None
