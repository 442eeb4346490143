"""The turns of a worker's engines on GPUs that the trainer uses too (``placement.shared = "turns"``).

Engines have their devices whenever no rank of the trainer wants one. When one is wanted they release their memory: in the mode ``drain``
running requests finish first, in others they return the tokens sampled so far. In their next turn they load the newest version, or the one that an evaluation holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from penstock.protocol.errors import DeviceNotFreed
from penstock.protocol.shared_device import POLL_S, SharedDevices
from penstock.rollout_service.metrics import WorkerMetrics

log = structlog.get_logger("rollout.device_turns")

_RETRY_S = 1.0  # after a version that could not be loaded


class EngineTurns:
    """For one event loop; without ``devices`` it is always the engines' turn."""

    def __init__(
        self, devices: SharedDevices | None = None, metrics: WorkerMetrics | None = None, *, deadline_s: float = 0.0
    ) -> None:
        self._devices, self._metrics, self._deadline_s = devices, metrics or WorkerMetrics(), deadline_s
        self._held = asyncio.Event()
        if devices is None:
            self._held.set()

    @property
    def is_held(self) -> bool:
        return self._held.is_set()

    async def wait(self) -> None:
        """Wait for the engines' turn; it may have ended again when this returns."""
        await self._held.wait()

    async def take(self) -> None:
        """Wait until the devices are free, and hold them; raises DeviceNotFreed, which names who has them, after the deadline."""
        if self._devices is None or self.is_held:
            return
        asked = time.monotonic()
        while not self._devices.try_take():
            if time.monotonic() - asked > self._deadline_s:
                raise DeviceNotFreed(
                    f"the engines' turn did not come within placement.turn_deadline_s = {self._deadline_s:.0f} s; "
                    f"{self._devices.holders()}. Look at that process's log, end it if it hangs, or raise the deadline where steps take longer"
                )
            await asyncio.sleep(POLL_S)
        self._metrics.turns += 1
        self._metrics.turn_wait_s += time.monotonic() - asked
        self._held.set()

    async def run(self, release: Callable[[], Awaitable[None]], resume: Callable[[], Awaitable[bool]]) -> None:
        """Release the devices whenever a trainer's rank wants one, then take them again; call it while they are held.

        ``release`` returns when the memory is free, ``resume`` True when the engines serve a version again.
        """
        devices = self._devices
        while devices is not None:
            while not devices.is_wanted:  # noqa: ASYNC110  no event tells that another process takes a lock
                await asyncio.sleep(POLL_S)
            asked = time.monotonic()
            self._held.clear()
            await release()
            devices.give()
            released = time.monotonic()
            log.info("engines released their memory", release_s=round(released - asked, 3))
            await self.take()
            taken = time.monotonic()
            while not devices.is_wanted and not await resume():  # noqa: ASYNC110  the same
                await asyncio.sleep(_RETRY_S)
            self._metrics.turn_move_s += released - asked + time.monotonic() - taken
            log.info(
                "engines sample again",
                trainer_s=round(taken - released, 3),
                resume_s=round(time.monotonic() - taken, 3),
            )
