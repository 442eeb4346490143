"""A process that serves until it is told to stop, and keeps itself registered: signals, Host headers, the renewal of a lease; for every kind of server.

A process that serves until it is told to stop: its signals, its keys, and which Host headers it answers.

Keep a server registered: wait for the registry, renew a lease, and say on stderr once what is wrong; for every kind of server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar
from urllib.parse import urlsplit

from penstock.protocol.errors import PenstockError
from penstock.protocol.transport import http_tls


@contextmanager
def stopping_by_signal(stop: asyncio.Event) -> Iterator[None]:
    """Set ``stop`` at the first SIGTERM or SIGINT, exit at the second: an author's code may be in an endless loop."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)  # an exception would surface inside the author's code, which may catch it
        stop.set()
        loop.call_soon_threadsafe(lambda: None)  # wakes the event loop

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def allowed_hosts(host: str, url: str | None, secrets: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names besides those of the loopback that a Host header may have; None: any.

    Without ``secrets``, a server on the loopback ``host`` trusts the programs of its machine, and no web page whose name resolves
    to it. ``url`` is where it is reached, if that is not the loopback: behind a proxy or a tunnel.
    """
    if secrets or not http_tls.is_loopback(host):
        return None
    name = urlsplit(url or "").hostname
    return (name,) if name else ()


T = TypeVar("T")

WAIT_S = 60.0  # the registry may be starting at the same time
RENEWALS_PER_LEASE = 3  # two consecutive renewals may fail
_PAUSE_S = 0.5


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


async def until_there(
    attempt: Callable[[], Awaitable[T]], passing: type[PenstockError], waiting: Callable[[PenstockError], str]
) -> T:
    """Return what ``attempt`` returns, which is tried again while it raises ``passing``; after `WAIT_S` that is raised.

    ``waiting`` makes the line that is written to stderr once, of the first error.
    """
    deadline, has_said = time.monotonic() + WAIT_S, False
    while True:
        try:
            return await attempt()
        except passing as err:
            if time.monotonic() > deadline:
                raise
            if not has_said:
                say(waiting(err))
                has_said = True
        await asyncio.sleep(_PAUSE_S)


class Renewals:
    """Says on stderr when a lease is not renewed any more, and when it is again."""

    def __init__(self) -> None:
        self._is_failing = False

    def tried(self, what: str, problem: str, hint: str) -> None:
        """Note how a renewal of ``what`` ended; ``problem`` is empty for one that succeeded."""
        if problem and not self._is_failing:
            say(f"the lease of {what} is not renewed: {problem}. {hint}")
        elif self._is_failing and not problem:
            say(f"the lease of {what} is renewed again")
        self._is_failing = bool(problem)


async def keep(lease_s: float, renew: Callable[[], Awaitable[bool]]) -> None:
    """Renew a lease until cancelled, or until ``renew`` returns False: another server has the name."""
    is_kept = True
    while is_kept:
        await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)
        is_kept = await renew()
