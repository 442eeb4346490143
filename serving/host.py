"""A process that serves until it is told to stop: its signals, and which Host headers it answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from urllib.parse import urlsplit

from penstock.protocol.transport import tls


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
    if secrets or not tls.is_loopback(host):
        return None
    name = urlsplit(url or "").hostname
    return (name,) if name else ()
