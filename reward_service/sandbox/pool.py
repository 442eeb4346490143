"""A pool of slots in which programs run: a bounded number at a time, each killable."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import structlog

from penstock.reward_service.errors import SandboxFailed
from penstock.reward_service.sandbox.grade import Graded, Slot, grade
from penstock.reward_service.sandbox.test_code import Proofs
from penstock.reward_service.sandbox.tests_of_row import Tests
from penstock.reward_service.sandbox.zygote_command import Launch
from penstock.reward_service.sandbox.zygote_process import Limits, Zygote

log = structlog.get_logger("reward_service.sandbox")

_TRIES = 2


class SandboxPool:
    """Grade ``num_slots`` programs at a time. A slot's zygote starts with its first program. Call `close` at the end."""

    def __init__(
        self, launch: Launch, num_slots: int, limits: Limits, *, stop_early: bool = False, group_cpu_s: float = math.inf
    ) -> None:
        """``stop_early`` ends a program's tests with the first failure, where only a full pass counts.

        ``group_cpu_s`` is the time for all programs of a group.
        """
        self._limits = limits
        self._group_cpu_s = group_cpu_s
        self._stop_early = stop_early
        proofs = Proofs()
        self._slots = [Slot(Zygote(launch, 2 * n), Zygote(launch, 2 * n + 1), proofs) for n in range(num_slots)]
        self._idle: asyncio.LifoQueue[Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        # The kernel kills a zygote with the thread that started it, so the threads are kept as long as the pool.
        self._threads = ThreadPoolExecutor(num_slots, thread_name_prefix="sandbox")

    @property
    def pids(self) -> list[int]:
        """Process ids of the running zygotes."""
        zygotes = [zygote for slot in self._slots for zygote in (slot.programs, slot.tests)]
        return [zygote.pid for zygote in zygotes if zygote.pid]

    async def grade(self, program: str, tests: Tests, num_programs: int = 1) -> Graded:
        """Run one of a group's ``num_programs`` against its tests; raises SandboxFailed (after a second try) or BadGroundTruth.

        Each has an equal part of the group's time, and the limit of one test at least: what one program uses up is not
        missing for another.
        """
        budget_s = max(self._limits.cpu_s, self._group_cpu_s / num_programs)
        slot = await self._idle.get()
        try:
            for tried in range(1, _TRIES + 1):
                try:
                    return await self._in_thread(slot, program, tests, budget_s)
                except SandboxFailed as err:
                    log.warning("sandbox failed", error=str(err), tried=tried)
                    slot.kill()
                    if tried == _TRIES:
                        raise
            raise AssertionError("unreachable")
        finally:
            self._idle.put_nowait(slot)

    async def _in_thread(self, slot: Slot, program: str, tests: Tests, budget_s: float) -> Graded:
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(
            self._threads,
            lambda: grade(slot, program, tests, self._limits, stop_early=self._stop_early, budget_s=budget_s),
        )
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            slot.stop()
            await asyncio.wait([running])  # ends soon: its zygotes were killed
            running.exception()  # retrieved, so that asyncio does not report it
            slot.stopped.clear()
            raise

    async def close(self) -> None:
        """Kill all zygotes and end all threads."""
        for slot in self._slots:
            slot.stop()
        await asyncio.to_thread(self._threads.shutdown)
        for slot in self._slots:
            slot.kill()
