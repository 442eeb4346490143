"""Outlasting a server that is away, or a disk that is full: wait, say for whom, go on when it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from penstock.protocol.errors import BlobStoreUnreachable, BusUnreachable
from penstock.rollout_service.errors import MirrorFull

T = TypeVar("T")
log = structlog.get_logger("rollout.patience")

FULL_RETRY_S = 1.0  # a server's own deadline has passed by then; a full disk refuses at once
PATIENCE_S = 3600.0  # then the worker ends with the error, and its supervisor decides


async def outlast(attempt: Callable[[], Awaitable[T]], what: str, *, patience_s: float = PATIENCE_S) -> T:
    """Repeat ``attempt`` while NATS or S3 is away or the disk full, with a warning for each attempt.

    Raises BlobStoreUnreachable, BusUnreachable or MirrorFull after ``patience_s``; any other error at once.
    """
    started = time.monotonic()
    while True:
        try:
            return await attempt()
        except (BlobStoreUnreachable, BusUnreachable, MirrorFull) as err:
            waited = time.monotonic() - started
            if waited > patience_s:
                raise
            log.warning("waiting", what=what, waited_s=round(waited, 1), error=str(err))
            if isinstance(err, MirrorFull):
                await asyncio.sleep(FULL_RETRY_S)
