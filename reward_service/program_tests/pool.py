"""A pool of slots in which programs run against their tests: a bounded number at a time, each killable."""

from __future__ import annotations

import math

from penstock.reward_service.errors import SandboxFailed
from penstock.reward_service.program_tests.grade import Graded, Slot, grade
from penstock.reward_service.program_tests.test_code import Proofs
from penstock.reward_service.program_tests.tests_of_row import Tests
from penstock.sandbox.slots import Slots
from penstock.sandbox.zygote_command import Launch, SandboxError
from penstock.sandbox.zygote_process import Limits, Zygote


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
        self._slots = Slots([Slot(Zygote(launch, 2 * n), Zygote(launch, 2 * n + 1), proofs) for n in range(num_slots)])

    @property
    def pids(self) -> list[int]:
        """Process ids of the running zygotes."""
        zygotes = [zygote for slot in self._slots.all for zygote in (slot.programs, slot.tests)]
        return [zygote.pid for zygote in zygotes if zygote.pid]

    async def grade(self, program: str, tests: Tests, num_programs: int = 1) -> Graded:
        """Run one of a group's ``num_programs`` against its tests; raises SandboxFailed (after a second try) or BadGroundTruth.

        Each has an equal part of the group's time, and the limit of one test at least: what one program uses up is not
        missing for another.
        """
        budget_s = max(self._limits.cpu_s, self._group_cpu_s / num_programs)
        try:
            return await self._slots.run(
                lambda slot: grade(slot, program, tests, self._limits, stop_early=self._stop_early, budget_s=budget_s)
            )
        except SandboxError as err:
            raise SandboxFailed(str(err)) from None

    async def close(self) -> None:
        """Kill all zygotes and end all threads."""
        await self._slots.close()
