"""Whose engine may pause now: a semaphore over all workers of a run, made of leases in NATS.

A new version reaches every worker at the same moment; did all engines stop for it together, generation
would stop too. So only a share of them swaps at a time, at least one. A turn is a key that vanishes by
itself when its holder dies.
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

log = structlog.get_logger("rollout.weights")

PATIENCE_S = 60.0  # then it swaps without a turn: a late version is worse than a crowded pause
_COUNT_AGAIN_S = 5.0
_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 0.2


class SwapSemaphore:
    """One worker's side of the semaphore."""

    def __init__(
        self, bus: Bus, *, run_id: str, worker_id: str, max_share: float, patience_s: float = PATIENCE_S
    ) -> None:
        """``max_share`` of the living workers may pause at once."""
        self._bus = bus
        self._run_id = run_id
        self._worker_id = worker_id
        self._max_share = max_share
        self._patience_s = patience_s
        self._leases: KeyValue | None = None
        self._num_turns = 1
        self._counted_at = -_COUNT_AGAIN_S

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a turn inside the block; waits for one, but not longer than its patience."""
        key, revision = await self._take()
        if key is None:
            yield
            return
        renewing = asyncio.create_task(self._renew(key, revision))
        try:
            yield
        finally:
            renewing.cancel()
            await self._give_back(key)

    async def _take(self) -> tuple[str | None, int]:
        deadline = time.monotonic() + self._patience_s
        poll_s = _FIRST_POLL_S
        while True:
            try:
                if (taken := await self._try()) is not None:
                    return taken
                problem = "all turns are taken"
            except BusError as err:
                problem = str(err)
            if time.monotonic() > deadline:
                log.warning("swapping without a turn", waited_s=self._patience_s, reason=problem)
                return None, 0
            await asyncio.sleep(poll_s * random.uniform(0.5, 1.5))  # noqa: S311  spreads the workers, keeps no secret
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    async def _try(self) -> tuple[str | None, int] | None:
        """Take a free turn; a key of None says that nobody needs one, None that there was none."""
        if self._leases is None:
            self._leases = await self._bus.key_value(streams.lease_bucket(self._run_id).bucket)
        if time.monotonic() - self._counted_at > _COUNT_AGAIN_S:
            await self._count()
        if self._num_turns == 0:
            return None, 0
        taken = {entry.key for entry in await self._leases.entries()}
        for number in range(self._num_turns):
            key = streams.swap_turn_key(number)
            if key not in taken:
                with contextlib.suppress(CompareAndSwapFailed):
                    return key, await self._leases.swap(key, self._worker_id.encode(), None)
        return None

    async def _count(self) -> None:
        """Set how many turns there are; 0 when this worker is alone and nobody else could pause with it."""
        live = await self._bus.key_value(streams.live_bucket(self._run_id).bucket)
        own = streams.heartbeat_key("rollout", self._worker_id)
        others = {e.key for e in await live.entries() if e.key.startswith(streams.heartbeat_key("rollout", ""))} - {own}
        self._num_turns = num_turns(len(others) + 1, self._max_share)
        self._counted_at = time.monotonic()

    async def _renew(self, key: str, revision: int) -> None:
        assert self._leases is not None
        while True:
            await asyncio.sleep(streams.LEASE_RENEWAL_S)
            try:
                revision = await self._leases.swap(key, self._worker_id.encode(), revision)
            except CompareAndSwapFailed:
                return  # NATS was away for longer than the lease lasts, and somebody else has the turn
            except BusError as err:
                log.debug("a turn was not renewed", error=str(err))

    async def _give_back(self, key: str) -> None:
        assert self._leases is not None
        with contextlib.suppress(BusError):  # it then vanishes by itself
            entry = await self._leases.get(key)
            if entry is not None and entry.value == self._worker_id.encode():
                await self._leases.delete(key)


def num_turns(num_workers: int, max_share: float) -> int:
    """Return how many of ``num_workers`` engines may pause at once: 0 for one worker alone, which needs no turn."""
    return 0 if num_workers == 1 else max(1, int(max_share * num_workers))
