"""Outlasting a server that is away: wait, say for whom, go on when it is back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from protocol.errors import BlobStoreUnreachable, BusUnreachable

T = TypeVar("T")
log = structlog.get_logger("rollout.patience")

PATIENCE_S = 3600.0  # then the worker ends with the error, and its supervisor decides


async def outlast(attempt: Callable[[], Awaitable[T]], what: str, *, patience_s: float = PATIENCE_S) -> T:
    """Repeat ``attempt`` while NATS or S3 is away, with a warning for each of their own deadlines.

    Raises BlobStoreUnreachable or BusUnreachable after ``patience_s``; any other error at once.
    """
    started = time.monotonic()
    while True:
        try:
            return await attempt()
        except (BlobStoreUnreachable, BusUnreachable) as err:
            waited = time.monotonic() - started
            if waited > patience_s:
                raise
            log.warning("waiting", what=what, waited_s=round(waited, 1), error=str(err))
