"""Run a program against its tests, and attribute each failure to its cause.

- the program: `Graded` with a ``reason``, a verdict like any other.
- the tests (they do not compile, their setup raises): BadGroundTruth.
- the sandbox, the machine, a SIGKILL from another process: SandboxFailed, never a verdict.

Every stdin and function test runs in a process of its own; expected results never enter the sandbox.
After a timeout the remaining tests count as failed, so that a program uses up one time limit and not hundreds.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import threading
from dataclasses import dataclass, field

from penstock.reward_service.errors import BadGroundTruth, SandboxFailed
from penstock.reward_service.sandbox import answers
from penstock.reward_service.sandbox.tests_of_row import Assertions, FunctionTests, StdinTests, Tests
from penstock.reward_service.sandbox.zygote_process import Killed, Limits, Run, Watch, Zygote, was_out_of_cpu


class Reason(enum.StrEnum):
    """Why a program did not pass a test."""

    NO_PROGRAM = "no_program"  # the completion contains none
    WRONG = "wrong"
    RAISED = "raised"  # an uncaught error, or an exit code other than 0
    CPU_TIME = "cpu_time"
    WALL_TIME = "wall_time"
    MEMORY = "memory"
    OUTPUT = "output"  # too much output
    FORBIDDEN = "forbidden"  # a system call that ordinary programs do not make
    CRASHED = "crashed"


_OUT_OF_TIME = (Reason.CPU_TIME, Reason.WALL_TIME)


@dataclass(frozen=True, slots=True)
class Graded:
    """The number of passed tests, and the reason and detail of the first failure."""

    passed: int
    total: int
    reason: Reason | None = None
    detail: str = ""


@dataclass(slots=True)
class Slot:
    """A slot that runs one program at a time; test code has a zygote of its own, started on first use."""

    programs: Zygote
    tests: Zygote
    stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Make the grading thread raise SandboxFailed soon; called from another thread."""
        self.stopped.set()
        self.programs.interrupt()
        self.tests.interrupt()

    def kill(self) -> None:
        """Kill both zygotes and their programs."""
        self.programs.kill()
        self.tests.kill()


def grade(slot: Slot, program: str, tests: Tests, limits: Limits, *, stop_early: bool) -> Graded:
    """Run all tests, or with ``stop_early`` up to the first failure. Raises SandboxFailed, BadGroundTruth."""
    if isinstance(tests, Assertions):
        return _by_test_code(slot, program, tests, limits)
    passed, total, first, detail = 0, _count(tests), None, ""
    for place in range(total):
        if slot.stopped.is_set():
            raise SandboxFailed("the grading of a program was stopped")
        run = _one(slot, program, tests, place, limits)
        reason = failure(run, limits)
        if reason is None and not _right(run, tests, place):
            reason = Reason.WRONG
        if reason is None:
            passed += 1
            continue
        if first is None:
            first, detail = reason, f"test {place}: {describe(run)}"
        if stop_early or reason in _OUT_OF_TIME:
            break
    return Graded(passed, total, first, detail)


def _count(tests: StdinTests | FunctionTests) -> int:
    return len(tests.outputs) if isinstance(tests, StdinTests) else len(tests.results)


def _one(slot: Slot, program: str, tests: StdinTests | FunctionTests, place: int, limits: Limits) -> Run:
    if isinstance(tests, StdinTests):
        return run_program(slot.programs, program, limits, stdin=tests.inputs[place])
    job = {"program": program, "function": tests.function, "arguments": tests.arguments[place]}
    with Watch(limits) as watch:
        run = watch.start(slot.programs, "function", job=_json(job))
        watch.wait()
    return run


def run_program(zygote: Zygote, program: str, limits: Limits, *, stdin: str = "") -> Run:
    """Run a program once; raises SandboxFailed."""
    with Watch(limits) as watch:
        run = watch.start(zygote, "stdin", job=_json({"program": program}), stdin=_bytes(stdin))
        watch.wait()
    return run


def _right(run: Run, tests: StdinTests | FunctionTests, place: int) -> bool:
    if isinstance(tests, StdinTests):
        return answers.same_output(run.output.decode(errors="replace"), tests.outputs[place])
    try:
        return answers.same_result(json.loads(run.answer), tests.results[place])
    except (ValueError, RecursionError):  # it wrote something else, or nothing
        return False


def failure(run: Run, limits: Limits) -> Reason | None:
    """Return how a program failed, None if it succeeded; raises SandboxFailed if the sandbox failed."""
    if run.killed is Killed.OUTPUT:
        return Reason.OUTPUT
    if (
        run.killed is Killed.WALL_TIME
    ):  # the kernel's kill comes a second of CPU time later, on a busy machine after the wall limit
        return Reason.CPU_TIME if run.cpu_s >= limits.cpu_s else Reason.WALL_TIME
    if was_out_of_cpu(run, limits):
        return Reason.CPU_TIME
    if run.signal == signal.SIGKILL:  # a program cannot send SIGKILL, not even to itself
        raise SandboxFailed("a program was killed by another process; check whether this machine ran out of memory")
    if run.signal:
        return Reason.FORBIDDEN if run.signal == signal.SIGSYS else Reason.CRASHED
    if run.exit_code:
        return Reason.MEMORY if _last_line(run).startswith("MemoryError") else Reason.RAISED
    return None


def describe(run: Run) -> str:
    """Return one line on how a program ended."""
    if run.signal:
        return f"ended by {signal.Signals(run.signal).name}"
    return _last_line(run) if run.exit_code else "its output is not the expected one"


def _last_line(run: Run) -> str:
    lines = run.errors[-2000:].decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _by_test_code(slot: Slot, program: str, tests: Assertions, limits: Limits) -> Graded:
    to_program, to_tests = os.pipe(), os.pipe()
    job = {"tests": tests.pieces, "setup": tests.setup, "entry_points": tests.entry_points}
    with Watch(limits) as watch:
        try:
            served = watch.start(
                slot.programs, "serve", job=_json({"program": program}), extra=[to_program[0]], answers=to_tests[1]
            )
        except BaseException:
            os.close(to_program[1])
            os.close(to_tests[0])
            raise
        tested = watch.start(slot.tests, "tests", job=_json(job), extra=[to_tests[0], to_program[1]])
        watch.wait(until=tested)
    return _verdict(served, tested, tests, limits)


def _verdict(served: Run, tested: Run, tests: Assertions, limits: Limits) -> Graded:
    said = [json.loads(line) for line in tested.answer.split(b"\n")[:-1]]
    broken = next((message["broken"] for message in said if "broken" in message), None)
    if broken is not None:
        raise BadGroundTruth(f"code: the row's tests cannot be run: {broken}")
    verdicts = [message for message in said if "ok" in message]
    passed = sum(message["ok"] for message in verdicts)
    total = max(len(tests.pieces), len(verdicts))
    ended_for_us = served.killed is Killed.DONE and served.signal == signal.SIGKILL
    own = None if ended_for_us else failure(served, limits)
    if not any("done" in message for message in said):
        own = own or _blame(tested, said, limits)
    elif passed == total:
        return Graded(passed, total)
    wrong = next((f"{m['why']} (test {m['test']})" for m in verdicts if not m["ok"]), "")
    return Graded(passed, total, own or Reason.WRONG, describe(served) if own else wrong)


def _blame(tested: Run, said: list[dict[str, object]], limits: Limits) -> Reason:
    """Return how a program kept its tests from finishing; raises SandboxFailed if the program is not the cause."""
    if tested.killed is Killed.WALL_TIME:
        return Reason.WALL_TIME
    if any("large" in message for message in said):  # the program's answers were too large for the tests
        return Reason.CPU_TIME if was_out_of_cpu(tested, limits) else Reason.MEMORY
    raise SandboxFailed(f"the test process did not finish ({describe(tested)}, {tested.cpu_s:.1f} s of CPU)")


def _json(job: object) -> bytes:
    return json.dumps(job).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")
