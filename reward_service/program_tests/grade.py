"""Run programs against their tests in a pool of slots, and attribute each failure to its cause.

- the program: `Graded` with a ``reason``, a verdict like any other.
- the tests (they do not compile, their setup raises, they accept any program): BadGroundTruth.
- the sandbox, the machine, a SIGKILL from another process: SandboxError, never a verdict.

Every stdin and function test runs in a process of its own; expected results never enter the sandbox.
After a timeout the remaining tests count as failed, so that a program uses up one time limit and not hundreds; so do
those that are left when a program has used up its part of its group's time.

`SandboxPool` runs a bounded number of programs at a time, each killable.
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import dataclass, field

from penstock.reward_service.errors import SandboxFailed
from penstock.reward_service.program_tests import test_code, tests_of_row
from penstock.reward_service.program_tests.test_code import Graded, Proofs
from penstock.reward_service.program_tests.tests_of_row import Assertions, FunctionTests, StdinTests, Tests
from penstock.sandbox.outcome import OUT_OF_TIME, Reason, describe, failure, run_program
from penstock.sandbox.slots import Slots
from penstock.sandbox.zygote_command import Launch, SandboxError
from penstock.sandbox.zygote_process import Limits, Run, Watch, Zygote


@dataclass(slots=True)
class Slot:
    """A slot that runs one program at a time; test code has a zygote of its own, started on first use.

    ``proofs`` are those of all slots of a pool.
    """

    programs: Zygote
    tests: Zygote
    proofs: Proofs = field(default_factory=Proofs)
    stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Make the grading thread raise SandboxError soon; called from another thread."""
        self.stopped.set()
        self.programs.interrupt()
        self.tests.interrupt()

    def resume(self) -> None:
        self.stopped.clear()

    def kill(self) -> None:
        self.programs.kill()
        self.tests.kill()


def grade(
    slot: Slot, program: str, tests: Tests, limits: Limits, *, stop_early: bool, budget_s: float = math.inf
) -> Graded:
    """Run all tests, or with ``stop_early`` up to the first failure. Raises SandboxError, BadGroundTruth.

    ``budget_s`` is the time that the tests of the program may take together, in CPU seconds; a wall second that it
    waits counts as it does for one test. A program that needs more fails as at the limit of one test.
    """
    if isinstance(tests, Assertions):
        proof = slot.proofs.of(slot.tests, tests, limits)
        return test_code.grade(slot.programs, slot.tests, program, tests, proof, limits)
    passed, total, first, detail = 0, _count(tests), None, ""
    cpu_s, began = 0.0, time.monotonic()
    for place in range(total):
        if slot.stopped.is_set():
            raise SandboxError("the grading of a program was stopped")
        if max(cpu_s, (time.monotonic() - began) / limits.wall_factor) >= budget_s:
            reason = Reason.CPU_TIME if cpu_s >= budget_s else Reason.WALL_TIME
            return Graded(
                passed,
                total,
                first or reason,
                detail or f"test {place}: the time for all tests, {budget_s:.0f} s, was used up",
            )
        run = _one(slot, program, tests, place, limits)
        cpu_s += run.cpu_s
        reason = failure(run, limits)
        if reason is None and not _right(run, tests, place):
            reason = Reason.WRONG
        if reason is None:
            passed += 1
            continue
        if first is None:
            first, detail = reason, f"test {place}: {describe(run)}"
        if stop_early or reason in OUT_OF_TIME:
            break
    return Graded(passed, total, first, detail)


def _count(tests: StdinTests | FunctionTests) -> int:
    return len(tests.outputs) if isinstance(tests, StdinTests) else len(tests.results)


def _one(slot: Slot, program: str, tests: StdinTests | FunctionTests, place: int, limits: Limits) -> Run:
    if isinstance(tests, StdinTests):
        return run_program(slot.programs, program, limits, stdin=tests.inputs[place])
    job = {"program": program, "function": tests.function, "arguments": tests.arguments[place]}
    with Watch(limits) as watch:
        run = watch.start(slot.programs, "function", job=json.dumps(job).encode())
        watch.wait()
    return run


def _right(run: Run, tests: StdinTests | FunctionTests, place: int) -> bool:
    if isinstance(tests, StdinTests):
        return tests_of_row.same_output(run.output.decode(errors="replace"), tests.outputs[place])
    try:
        return tests_of_row.same_result(json.loads(run.answer), tests.results[place])
    except (ValueError, RecursionError):  # it wrote something else, or nothing
        return False


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
        await self._slots.close()
