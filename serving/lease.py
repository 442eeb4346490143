"""Leases of registered servers: their keys, whether one is valid, and the renewal by the server.

A server is in service while it renews its lease, a key below ``lease.`` in the registry's bucket. Rewards and
environments are both registered so; the rest is theirs. A lease that NATS does not expire is judged by `Leases`.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from penstock.protocol.errors import PenstockError

PREFIX = "lease."
T = TypeVar("T")
WAIT_S = 60.0  # the registry may be starting at the same time
RENEWALS_PER_LEASE = 3  # two consecutive renewals may fail
_PAUSE_S = 0.5


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
    def __init__(self) -> None:
        self._is_failing = False

    def tried(self, what: str, problem: str, hint: str) -> None:
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
