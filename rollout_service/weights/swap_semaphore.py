"""A semaphore over all workers of a run, made of leases in NATS: it limits how many engines pause to swap at once.

A new version reaches every worker at the same moment. If all engines paused for it together, generation would stop. So
only a share of them swaps at a time, at least one. A permit is a key that expires when its holder is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import structlog

from penstock.protocol import streams
from penstock.protocol.errors import BusError, CompareAndSwapFailed
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue

log = structlog.get_logger("rollout.swap_semaphore")

PERMIT_DEADLINE_S = 60.0  # then the worker swaps without a permit: that costs less than serving an old version
_COUNT_PERIOD_S = 5.0
_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 0.2


class SwapSemaphore:
    def __init__(
        self, bus: Bus, *, run_id: str, worker_id: str, max_share: float, deadline_s: float = PERMIT_DEADLINE_S
    ) -> None:
        self._bus = bus
        self._run_id = run_id
        self._worker_id = worker_id
        self._max_share = max_share
        self._deadline_s = deadline_s
        self._leases: KeyValue | None = None
        self._num_permits = 1
        self._counted_at = -_COUNT_PERIOD_S

    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Hold a permit inside the block; without one when none is free within the deadline."""
        key, revision = await self._acquire()
        if key is None:
            yield
            return
        renewing = asyncio.create_task(self._renew(key, revision))
        try:
            yield
        finally:
            renewing.cancel()
            await self._release(key)

    async def _acquire(self) -> tuple[str | None, int]:
        deadline = time.monotonic() + self._deadline_s
        poll_s = _FIRST_POLL_S
        while True:
            try:
                if (acquired := await self._try_acquire()) is not None:
                    return acquired
                problem = "all permits are taken"
            except BusError as err:
                problem = str(err)
            if time.monotonic() > deadline:
                log.warning("swapping without a permit", waited_s=self._deadline_s, reason=problem)
                return None, 0
            await asyncio.sleep(poll_s * random.uniform(0.5, 1.5))  # noqa: S311  spreads the workers, keeps no secret
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    async def _try_acquire(self) -> tuple[str | None, int] | None:
        """Return a permit's key and revision; a key of None: no permit is needed; None: none is free."""
        if self._leases is None:
            self._leases = await self._bus.key_value(streams.lease_bucket(self._run_id).bucket)
        if time.monotonic() - self._counted_at > _COUNT_PERIOD_S:
            await self._count_workers()
        if self._num_permits == 0:
            return None, 0
        taken = {entry.key for entry in await self._leases.entries()}
        for number in range(self._num_permits):
            key = streams.swap_permit_key(number)
            if key not in taken:
                with contextlib.suppress(CompareAndSwapFailed):
                    return key, await self._leases.swap(key, self._worker_id.encode(), None)
        return None

    async def _count_workers(self) -> None:
        live = await self._bus.key_value(streams.live_bucket(self._run_id).bucket)
        own = streams.heartbeat_key("rollout", self._worker_id)
        others = {e.key for e in await live.entries() if e.key.startswith(streams.heartbeat_key("rollout", ""))} - {own}
        self._num_permits = num_permits(len(others) + 1, self._max_share)
        self._counted_at = time.monotonic()

    async def _renew(self, key: str, revision: int) -> None:
        assert self._leases is not None
        while True:
            await asyncio.sleep(streams.LEASE_RENEWAL_S)
            try:
                revision = await self._leases.swap(key, self._worker_id.encode(), revision)
            except CompareAndSwapFailed:
                return  # NATS was unreachable for longer than the lease lasts, and another worker has the permit
            except BusError as err:
                log.debug("permit not renewed", error=str(err))

    async def _release(self, key: str) -> None:
        assert self._leases is not None
        with contextlib.suppress(BusError):  # the key then expires
            entry = await self._leases.get(key, may_lag=True)
            if entry is not None and entry.value == self._worker_id.encode():
                await self._leases.delete(key)


def num_permits(num_workers: int, max_share: float) -> int:
    """Return how many of ``num_workers`` engines may pause at once; 0 for a single worker, which needs no permit."""
    return 0 if num_workers == 1 else max(1, int(max_share * num_workers))
