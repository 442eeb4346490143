"""take → fetch → score → announce → acknowledge.

One task for each pack in progress (`pack_scoring`). A message is acknowledged only after every one of its groups was
announced as scored or stored as a dead letter. Until then its ack deadline is extended, or it is requeued with a delay;
if this process exits, the broker delivers it again.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from penstock.protocol.errors import BlobStoreUnreachable, BusUnreachable
from penstock.protocol.facts import GroupGenerated
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.reward_service.pack_scoring import Pack, ScoringContext, score_pack

log = structlog.get_logger("reward_service")
_FETCH_WAIT_S = 1.0  # also how long a stop may go unnoticed
_UNREACHABLE_DELAY_S = 5.0  # before a pack is redelivered after S3 or NATS was unreachable


class WorkSlots:
    """Slots for packs in work. A pack that only waits for another process gives its slot back and is still held."""

    def __init__(self, num_slots: int, max_packs: int) -> None:
        """``num_slots`` packs may be worked on at a time, ``max_packs`` may be held, those that wait included."""
        self._num_slots = num_slots
        self._max_packs = max_packs
        self._working: set[int] = set()
        self._held = 0
        self._changed = asyncio.Event()

    @property
    def free(self) -> int:
        return max(0, min(self._num_slots - len(self._working), self._max_packs - self._held))

    def acquire(self, sequence: int) -> None:
        self._working.add(sequence)
        self._held += 1

    def release(self, sequence: int) -> None:
        """Take the slot back: all that the pack still waits for is outside this process. Idempotent."""
        self._working.discard(sequence)
        self._changed.set()

    def finish(self, sequence: int) -> None:
        self._held -= 1
        self.release(sequence)

    async def wait_for_change(self, wait_s: float) -> None:
        # not wait_for: in Python 3.11 it swallows a cancellation that comes with the change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._changed.clear()


async def run(
    inbox: Inbox[GroupGenerated], context: ScoringContext, *, slots: WorkSlots, stop: asyncio.Event, drain_s: float
) -> None:
    """Score packs, as many at a time as there are ``slots``, until ``stop``; then finish within ``drain_s``.

    Raises errors that no retry can remove: refused credentials, a stream or bucket that does not exist.
    """
    under_way: set[asyncio.Task[None]] = set()
    try:
        while not stop.is_set():
            if free := slots.free:
                for delivery in await inbox.fetch(free, _FETCH_WAIT_S):
                    slots.acquire(delivery.sequence)
                    under_way.add(asyncio.create_task(_handle(delivery, context, slots)))
            else:
                await slots.wait_for_change(_FETCH_WAIT_S)
            under_way = _still_running(under_way)
        if under_way:
            log.info("draining", packs=len(under_way), at_most_s=drain_s)
            await asyncio.wait(under_way, timeout=drain_s)
    finally:
        for task in under_way:
            task.cancel()  # requeues its message
        await asyncio.gather(*under_way, return_exceptions=True)
    _still_running(under_way)


async def _handle(delivery: Delivery[GroupGenerated], context: ScoringContext, slots: WorkSlots) -> None:
    pack = Pack(delivery, await context.progress.load(delivery.sequence, delivery.num_delivered))
    try:
        with context.activity.working("scoring"):
            await score_pack(pack, context, lambda: slots.release(delivery.sequence))
    except (BlobStoreUnreachable, BusUnreachable) as err:
        log.warning(
            "pack requeued: NATS or S3 unreachable (does not count as an attempt)",
            pack_id=delivery.fact.pack_id,
            error=str(err),
        )
        context.metrics.num_errors += 1
        excused = pack.progress.excuse(group.group_id for group in pack.unsettled)
        await context.progress.save(delivery.sequence, excused)
        await delivery.give_back(_UNREACHABLE_DELAY_S)
    except asyncio.CancelledError:
        with contextlib.suppress(BusUnreachable):
            await context.progress.save(delivery.sequence, pack.progress)
            await delivery.give_back(0.0)
        raise
    finally:
        slots.finish(delivery.sequence)


def _still_running(under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    for task in under_way:
        if task.done() and not task.cancelled():
            task.result()
    return {task for task in under_way if not task.done()}
