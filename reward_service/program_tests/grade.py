"""Run programs against their tests in a pool of slots, and attribute each failure to its cause.

- the program: `Graded` with a ``reason``, a verdict like any other.
- the tests (they do not compile, their setup raises, they accept any program): BadGroundTruth.
- the sandbox, the machine, a SIGKILL from another process: SandboxError, never a verdict.

Every stdin and function test runs in a separate process; expected results never enter the sandbox.
After a timeout the remaining tests count as failed, so that a program uses up one time limit and not hundreds; so do
those that are left when a program has used up its part of its group's time.

`SandboxPool` runs a bounded number of programs at a time, each killable.

Test code first proves that it rejects programs. The proof runs it with stand-ins that answer every call alike
(`inside/program_proxy.STUBS`). Test code that accepts them all asserts nothing: functions that are never called, a bare comparison, a
swallowed AssertionError. It is an error of the row, like a missing module. A proof is made once for the tests of a row and kept.

When the test process uses up a limit after the program has answered, its answers are the cause, because the tests
have finished with a stand-in; tests that never do are an error of the row.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.reward_service.errors import BadGroundTruth, SandboxFailed
from penstock.reward_service.program_tests import tests_of_row
from penstock.reward_service.program_tests.tests_of_row import Assertions, FunctionTests, StdinTests, Tests
from penstock.sandbox.inside.program_proxy import CHANGES, EMPTY, STUBS, UNCHANGED
from penstock.sandbox.slots import Slots
from penstock.sandbox.zygote_command import Launch, SandboxError
from penstock.sandbox.zygote_process import (
    OUT_OF_TIME,
    Killed,
    Limits,
    Reason,
    Run,
    Watch,
    Zygote,
    describe,
    failure,
    run_program,
)

_KNOWN_PROOFS = 4096
_EMPTY, _ANY_RESULT = set(STUBS), {"opaque", "none"}
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Graded:
    passed: int
    total: int
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the tests of a row did with the stand-ins.

    Attributes:
        problem: Why the tests cannot be used, "" if they reject programs.
        num_tests: The number of tests in each piece of test code.
        has_finished: True if the tests ended within their limits with one stand-in at least.
        hidden: The piece and the number in it of each test that does not see changes of arguments.
    """

    problem: str
    num_tests: tuple[int, ...]
    has_finished: bool
    hidden: tuple[tuple[int, int], ...] = ()


class Proofs:
    """The proofs of the latest rows; used by several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Proof] = OrderedDict()

    def of(self, zygote: Zygote, tests: Assertions, limits: Limits) -> Proof:
        key = hashlib.sha256(json.dumps([tests.pieces, tests.setup, tests.entry_points]).encode()).digest()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = prove(zygote, tests, limits)
            while len(self._known) > _KNOWN_PROOFS:
                self._known.popitem(last=False)
        return known


def prove(zygote: Zygote, tests: Assertions, limits: Limits) -> Proof:
    messages: list[Message] = []
    left = list(STUBS)
    while left:
        with Watch(limits) as watch:
            run = watch.start(zygote, "tests", job=_job(tests, stubs=left))
            watch.wait()
        said = _said(run)
        messages += said
        broken = _broken(said)
        if broken is not None:
            return Proof(f"cannot be run: {broken}", (), has_finished=True)
        if any("done" in message for message in said):
            break
        failure(run, limits)  # raises SandboxError if the machine is the cause
        ended = {message["stub"] for message in said if "finished" in message}
        left = [kind for kind in left if kind not in ended][1:]  # the tests did not end with the first of them
    has_finished = any("finished" in message for message in messages)
    num_tests = _num_tests(messages, len(tests.pieces))
    if (problem := _problem(messages)) or not has_finished:
        return Proof(problem, num_tests, has_finished)
    empty, first = _accepted(_stubbed(zygote, tests, EMPTY, limits)), _accepted(messages)
    if empty and all(
        stubs >= set(EMPTY) and "none" not in first[test] for test, stubs in empty.items()
    ):  # they iterate
        return Proof("assert nothing: they pass with a program that returns anything empty", num_tests, has_finished)
    changed = _stubbed(zygote, tests, CHANGES, limits)
    inert = {test for test, stubs in _accepted(messages).items() if "opaque" in stubs}  # whatever is returned
    whatever = {f"{kind.split()[0]} 0" for kind in CHANGES}
    blind = {test for test, stubs in _accepted(changed).items() if whatever <= stubs} - inert
    if len(blind) == sum(num_tests):
        return Proof("assert nothing: they pass with a program that empties its arguments", num_tests, has_finished)
    won = _won(changed)
    if won:  # an answer that is right without a change is no use of it
        kinds = sorted({kind + UNCHANGED for stubs in won.values() for kind in stubs})
        for test, stubs in _accepted(_stubbed(zygote, tests, kinds, limits)).items():
            won[test] = won.get(test, set()) - {kind.removesuffix(UNCHANGED) for kind in stubs}
    num_changes = {test: len({kind.split()[0] for kind in stubs}) for test, stubs in won.items() if stubs}
    hidden = tuple(test for test, count in sorted(num_changes.items()) if count > 1)
    accepted = _accepted(changed)
    # A change that wins one test, and passes them all.
    of_all = set[str]().union(*won.values()).intersection(*accepted.values())
    is_won = len(accepted) == sum(num_tests) and not hidden and bool(of_all)
    if is_won or len(hidden) < len(num_changes) == sum(num_tests):
        problem = "pass with a program that empties its arguments and returns an empty value"
    return Proof(problem, num_tests, has_finished, hidden)


def _stubbed(zygote: Zygote, tests: Assertions, kinds: Sequence[str], limits: Limits) -> list[Message]:
    with Watch(limits) as watch:
        run = watch.start(zygote, "tests", job=_job(tests, stubs=kinds))
        watch.wait()
    failure(run, limits)  # raises SandboxError if the machine is the cause
    return _said(run)


def _won(messages: Sequence[Message]) -> dict[tuple[int, int], set[str]]:
    """Return the tests that compare an answer with what a program could have changed, and the stand-ins that win them.

    A test won by two changes, each with an answer of its own, compares the two; one won by a single change may also expect that
    very change. A test won by a change whatever is returned looks at the argument alone.
    """
    won: dict[tuple[int, int], set[str]] = {}
    for test, stubs in _accepted(messages).items():
        if winning := {kind for kind in stubs if re.sub("[0-9]", "0", kind) not in stubs}:
            won[test] = winning
    return won


def _accepted(messages: Sequence[Message]) -> dict[tuple[int, int], set[str]]:
    """Return the stand-ins that each test accepts, by its piece and its number in it."""
    accepted: dict[tuple[int, int], set[str]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for message in messages:
        if "ok" in message:
            kind, place = message["stub"], message["test"]
            stubs = accepted.setdefault((place, seen[kind, place]), set())
            seen[kind, place] += 1
            if message["ok"]:
                stubs.add(kind)
    return accepted


def _problem(messages: Sequence[Message]) -> str:
    accepted = _accepted(messages)
    for (place, number), stubs in sorted(accepted.items()):
        if stubs == _EMPTY:
            which = f"test {number} of piece {place}" if len(accepted) > 1 else "the test"
            return f"assert nothing: {which} passes with an empty program, and whatever the program returns"
    if accepted and all(stubs >= _ANY_RESULT for stubs in accepted.values()):
        return "assert nothing: they pass whatever the program returns"
    return ""


def grade_program(
    programs: Zygote, tester: Zygote, program: str, tests: Assertions, proof: Proof, limits: Limits
) -> Graded:
    """Run a program's tests; raises BadGroundTruth when they prove nothing or cannot be run, SandboxError."""
    if proof.problem:
        raise BadGroundTruth(f"code: the row's tests {proof.problem}")
    to_program, to_tests = os.pipe(), os.pipe()
    with Watch(limits) as watch:
        try:
            job = json.dumps({"program": program}).encode()
            served = watch.start(programs, "serve", job=job, extra=[to_program[0]], answers=to_tests[1])
        except BaseException:
            os.close(to_program[1])
            os.close(to_tests[0])
            raise
        tested = watch.start(tester, "tests", job=_job(tests, hidden=proof.hidden), extra=[to_tests[0], to_program[1]])
        watch.wait(until=tested)
    return _verdict(served, tested, proof, limits)


def _verdict(served: Run, tested: Run, proof: Proof, limits: Limits) -> Graded:
    said = _said(tested)
    broken = _broken(said)
    if broken is not None:
        raise BadGroundTruth(f"code: the row's tests cannot be run: {broken}")
    verdicts = [message for message in said if "ok" in message]
    counts = zip(proof.num_tests, _num_tests(said, len(proof.num_tests)), strict=True)
    total = sum(max(pair) for pair in counts)
    passed = min(sum(message["ok"] for message in verdicts), total)
    ended_for_us = served.killed is Killed.DONE and served.signal == signal.SIGKILL
    reason = None if ended_for_us else failure(served, limits)
    if not any("done" in message for message in said):
        if not proof.has_finished:
            raise BadGroundTruth("code: the row's tests exceed their limits with any program, also with an empty one")
        reason = reason or _exhaustion(tested, said, limits)
    elif passed == total:
        return Graded(passed, total)
    wrong = next((f"{m['why']} (test {m['test']})" for m in verdicts if not m["ok"]), "")
    return Graded(min(passed, total - 1), total, reason or Reason.WRONG, describe(served) if reason else wrong)


def _exhaustion(tested: Run, said: Sequence[Message], limits: Limits) -> Reason:
    reason = failure(tested, limits)
    if reason is None or not any("answered" in message for message in said):
        raise SandboxError(f"the test process did not finish ({describe(tested)}, {tested.cpu_s:.1f} s of CPU)")
    return reason


def _num_tests(messages: Sequence[Message], num_pieces: int) -> tuple[int, ...]:
    """Return the number of tests in every piece: as planned or as reported; 1 for one that was not reached."""
    planned: dict[int, int] = {}
    reported: Counter[tuple[str, int]] = Counter()
    for message in messages:
        if "planned" in message:
            planned[message["place"]] = max(planned.get(message["place"], 0), message["planned"])
        elif "ok" in message:
            reported[message.get("stub", ""), message["test"]] += 1
    most: dict[int, int] = {}
    for (_, place), count in reported.items():
        most[place] = max(most.get(place, 0), count)
    return tuple(max(planned.get(n, 0), most.get(n, 0 if n in planned else 1)) for n in range(num_pieces))


def _job(tests: Assertions, *, stubs: Sequence[str] | None = None, hidden: Sequence[tuple[int, int]] = ()) -> bytes:
    job = {"tests": tests.pieces, "setup": tests.setup, "entry_points": tests.entry_points, "hidden": hidden}
    return json.dumps(job if stubs is None else {**job, "stubs": stubs}).encode()


def _said(tested: Run) -> list[Message]:
    return [json.loads(line) for line in tested.answer.split(b"\n")[:-1]]


def _broken(said: Sequence[Message]) -> str | None:
    return next((message["broken"] for message in said if "broken" in message), None)


@dataclass(slots=True)
class Slot:
    """A slot that runs one program at a time; test code has a separate zygote, started on first use.

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
        return grade_program(slot.programs, slot.tests, program, tests, proof, limits)
    passed, total, first, detail = 0, _count(tests), None, ""
    cpu_s, began = 0.0, time.monotonic()
    for place in range(total):
        if slot.stopped.is_set():
            raise SandboxError("the grading of a program was stopped")
        if max(cpu_s, (time.monotonic() - began) / limits.wall_factor) >= budget_s:
            reason = Reason.CPU_TIME if cpu_s >= budget_s else Reason.WALL_TIME
            return Graded(
                passed, total, first or reason,
                detail or f"test {place}: the time for all tests, {budget_s:.0f} s, was used up",
            )  # fmt: skip
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
        return tests_of_row.same_result(tests_of_row.result_of(run.answer), tests.results[place])
    except (ValueError, RecursionError):  # it wrote something else, or nothing
        return False


class SandboxPool:
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
