"""Which of several servers of one environment gets the next episode; the caller gives the time. And the wait for a place at one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.agents.environments.over_http.registry import Listed

_FIRST_REST_S, _LONGEST_REST_S = 0.5, 30.0
_WAIT_S = 0.25  # for a registration, or for an episode to end


@dataclass(slots=True)
class Server:
    url: str
    running: int = 0  # episodes of this worker
    failures: int = 0  # in a row
    rests_until: float = 0.0  # no new episode before this time
    version: str = ""  # that it was registered with; empty: the URL is from the run file
    capacity: int | None = None  # episodes at once, of all workers together; None: it is not known
    is_leased: bool = True  # False: it is registered no more, so what it does not answer is not repeated
    takes_new: bool = True  # False: it is drained or replaced; its episodes go on

    @property
    def has_place(self) -> bool:
        """True unless this worker alone has filled it."""
        return self.takes_new and (self.capacity is None or self.running < self.capacity)

    def failed(self, now: float) -> None:
        """Give it no new episode for a while, twice as long after each failure in a row; those of calls in flight are one."""
        if now < self.rests_until:
            return
        self.failures += 1
        self.rests_until = now + min(_FIRST_REST_S * 2.0 ** (self.failures - 1), _LONGEST_REST_S)

    def is_full(self, now: float, retry_after_s: float) -> None:
        """Give it no new episode before it wants one; a server that is full has not failed."""
        self.rests_until = now + min(max(retry_after_s, 0.05), _LONGEST_REST_S)

    def works(self) -> None:
        self.failures, self.rests_until = 0, 0.0


class Servers:
    def __init__(self, urls: Sequence[str] = (), *, registered: str = "", version: str = "") -> None:
        """Start with the URLs of a run file, or with none of a name, to which `read` gives those that are registered.

        Of a name, only servers of ``version`` are used; empty: of any.
        """
        self.turn = asyncio.Lock()  # of those who wait for a place: they get it in the order in which they came
        self._servers = {("", url): Server(url) for url in urls}
        self._name, self._version = registered, version
        self._problem = ""

    def read(self, listed: Listed) -> None:
        """Take over what is registered; a server that is not any more keeps its episodes and gets no others."""
        servers = listed.registered.servers if listed.registered is not None else ()
        states = {(one.version, one.url): listed.state(one) for one in servers}
        for server in servers:
            known = self._servers.setdefault((server.version, server.url), Server(server.url, version=server.version))
            known.capacity = server.capacity
        for place, server in list(self._servers.items()):
            state = states.get(place, "lease expired")
            server.is_leased = state != "lease expired"
            server.takes_new = state == "in service" and self._version in ("", server.version)
            if place not in states and not server.running:
                del self._servers[place]
        self._problem = listed.problem or "; ".join(
            f"{url} (version {version}): {state}" for (version, url), state in states.items()
        )

    def choose(self, now: float) -> Server | None:
        ready = [one for one in self._servers.values() if one.has_place and one.rests_until <= now]
        return min(ready, key=lambda one: one.running / (one.capacity or 1)) if ready else None

    def ready_in_s(self, now: float) -> float:
        rests = [one.rests_until - now for one in self._servers.values() if one.has_place]
        soonest = max(0.0, min(rests)) if rests else _WAIT_S
        return min(soonest, _WAIT_S) if self._name else soonest  # another one may register meanwhile

    def why_none(self, last: str) -> str:
        if not self._name:
            return last
        wanted = f", of which the run expects version {self._version!r} (options.version)" if self._version else ""
        state = self._problem or "not read yet"
        return f"registered environment {self._name!r}: {state}{wanted}{'; ' if last else ''}{last}"


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
