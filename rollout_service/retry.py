"""Retry an operation while NATS or S3 is unreachable or the disk is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from penstock.protocol.errors import BlobStoreUnreachable, BusUnreachable
from penstock.rollout_service.errors import MirrorFull

T = TypeVar("T")
log = structlog.get_logger("rollout.retry")

DISK_FULL_PERIOD_S = 1.0  # a full disk fails at once, an unreachable server only after its deadline
DEADLINE_S = 3600.0  # then the worker exits with the error, and its supervisor decides


async def retry(attempt: Callable[[], Awaitable[T]], operation: str, *, deadline_s: float = DEADLINE_S) -> T:
    """Repeat ``attempt`` while NATS or S3 is unreachable or the disk full; log a warning for each failure.

    Raises BlobStoreUnreachable, BusUnreachable or MirrorFull after ``deadline_s``; any other error at once.
    """
    started = time.monotonic()
    while True:
        try:
            return await attempt()
        except (BlobStoreUnreachable, BusUnreachable, MirrorFull) as err:
            waited = time.monotonic() - started
            if waited > deadline_s:
                raise
            log.warning("retrying", operation=operation, waited_s=round(waited, 1), error=str(err))
            if isinstance(err, MirrorFull):
                await asyncio.sleep(DISK_FULL_PERIOD_S)
