"""What hosting a reward and hosting an environment have in common: the registration, its lease, the signals, the end.

A reward registers at a reward service, an environment on NATS: each is a `ServerRegistration`, which says how. When a
lease is renewed, what stderr says when it is not, and that a server which stops is unregistered, is the same for both.

A server is in service while it renews its lease, a key below ``lease.`` in the registry's bucket. A lease that NATS does
not expire is judged by `Leases`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import FrameType
from typing import TextIO, TypeVar

from penstock.protocol.errors import PenstockError

T = TypeVar("T")
Passing = TypeVar("Passing", bound=PenstockError)
PREFIX = "lease."  # of the keys of leases
WAIT_S = 60.0  # the registry may be starting at the same time
RENEWALS_PER_LEASE = 3  # two consecutive renewals may fail
_PAUSE_S = 0.5
_POLL_S = 0.05


def server_id(version: str, url: str) -> str:
    return hashlib.sha256(f"{version}\n{url}".encode()).hexdigest()[:16]


def lease_key(name: str, server: str) -> str:
    return f"{PREFIX}{name}.{server}"


class Leases:
    """When each lease was last seen to be renewed, by its reader's clock. Pure.

    A renewal rewrites the lease's key, which gives it a new revision. A lease is valid for so many seconds of the
    reader's monotonic clock after it saw the revision change, so that no two machines need to agree on the time. One
    that it sees for the first time is valid for all of them.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # by its key: revision, when it was first seen

    def saw(self, revisions: Mapping[str, int], now: float) -> None:
        """Record the current revisions of all leases, by key; leases that are not among them are forgotten."""
        self._seen = {
            key: self._seen[key] if self._seen.get(key, (None,))[0] == revision else (revision, now)
            for key, revision in revisions.items()
        }

    def renewed(self, key: str, revision: int, now: float) -> None:
        self._seen[key] = (revision, now)

    def expired_for_s(self, key: str, lease_s: float | None, now: float) -> float:
        """Return the seconds since a lease of ``lease_s`` expired; 0.0: valid, or none needed; ``now``: never seen."""
        if lease_s is None:
            return 0.0
        seen = self._seen.get(key)
        return max(0.0, now - seen[1] - lease_s) if seen is not None else now


def say(text: str, to: TextIO | None = None) -> None:
    """Write a line to stderr, or elsewhere, at once."""
    print(text, file=to or sys.stderr, flush=True)


async def until_there(
    attempt: Callable[[], Awaitable[T]], passing: type[Passing], waiting: Callable[[Passing], str]
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


class ServerRegistration(ABC):
    """One server in a registry."""

    what: str  # the server, in messages
    lease_s: float | None  # seconds without a renewal after which it is out of service; None: it has no lease
    hint: str = ""  # what follows when the lease has expired, and what to do
    _is_failing = False

    @abstractmethod
    async def register(self) -> None:
        """Register the server; raises PenstockError."""

    @abstractmethod
    async def _renew(self) -> bool:
        """Renew the lease; return False if another server has the name now. Raises PenstockError."""

    @abstractmethod
    async def _remove(self) -> None:
        """Remove the server, if it still has the name; raises PenstockError."""

    async def renew(self) -> bool:
        """Return False if another server has the name; stderr says when renewals begin to fail, and succeed again."""
        try:
            is_kept = await self._renew()
        except PenstockError as err:
            if not self._is_failing:
                say(
                    f"the lease of {self.what} is not renewed: {err}. It is out of service {self.lease_s:g} s after the "
                    f"last renewal; it is tried again. {self.hint}".rstrip()
                )
            self._is_failing = True
            return True
        if self._is_failing and is_kept:
            say(f"the lease of {self.what} is renewed again")
        self._is_failing = False
        return is_kept

    async def keep(self) -> None:
        """Renew the lease, if there is one, until cancelled or until another server has the name."""
        is_kept = True
        while is_kept and self.lease_s is not None:
            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)
            is_kept = await self.renew()

    @contextlib.asynccontextmanager
    async def registered(self) -> AsyncIterator[None]:
        """Register, and renew the lease while the block runs; raises what `register` raises."""
        await self.register()
        renewing = asyncio.create_task(self.keep())
        try:
            yield
        finally:
            renewing.cancel()  # a renewal that finds the name gone would register it again
            await asyncio.gather(renewing, return_exceptions=True)
            try:
                await self._remove()
            except PenstockError as err:
                end = "it stays registered" if self.lease_s is None else "its lease will expire"
                say(f"{self.what} was not unregistered: {err}; {end}")


@contextlib.contextmanager
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


async def drain(running: Callable[[], int], what: str, drain_s: float) -> None:
    """Wait until none of ``what`` is in progress, at most ``drain_s``; stderr says what is waited for, and is left."""
    ends = time.monotonic() + drain_s
    if running():
        say(f"{running()} {what} in progress; press Ctrl-C again to exit without waiting for them")
    while running() and time.monotonic() < ends:  # noqa: ASYNC110 - a reward and an environment count in their own ways
        await asyncio.sleep(_POLL_S)
    if running():
        say(f"{running()} {what} did not finish within --drain-s {drain_s:g}")
