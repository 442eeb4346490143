"""Run a program against test code, after the test code has proven that it rejects programs.

The proof runs the tests with stand-ins that answer every call alike (`inside/program_proxy.STUBS`). Test code that
accepts them all asserts nothing: functions that are never called, a bare comparison, a swallowed AssertionError. It is
an error of the row, like a missing module. A proof is made once for the tests of a row and kept.

When the test process uses up a limit after the program has answered, its answers are the cause, because the tests
have finished with a stand-in; tests that never do are an error of the row.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.program_tests.tests_of_row import Assertions
from penstock.sandbox.inside.program_proxy import STUBS
from penstock.sandbox.outcome import Reason, describe, failure
from penstock.sandbox.zygote_command import SandboxError
from penstock.sandbox.zygote_process import Killed, Limits, Run, Watch, Zygote

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
    """

    problem: str
    num_tests: tuple[int, ...]
    has_finished: bool


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
    return Proof(_problem(messages), _num_tests(messages, len(tests.pieces)), has_finished)


def _problem(messages: Sequence[Message]) -> str:
    accepted: dict[tuple[int, int], set[str]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for message in messages:
        if "ok" in message:
            kind, place = message["stub"], message["test"]
            stubs = accepted.setdefault((place, seen[kind, place]), set())
            seen[kind, place] += 1
            if message["ok"]:
                stubs.add(kind)
    for (place, number), stubs in sorted(accepted.items()):
        if stubs == _EMPTY:
            which = f"test {number} of piece {place}" if len(accepted) > 1 else "the test"
            return f"assert nothing: {which} passes with an empty program, and whatever the program returns"
    if accepted and all(stubs >= _ANY_RESULT for stubs in accepted.values()):
        return "assert nothing: they pass whatever the program returns"
    return ""


def grade(programs: Zygote, tester: Zygote, program: str, tests: Assertions, proof: Proof, limits: Limits) -> Graded:
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
        tested = watch.start(tester, "tests", job=_job(tests), extra=[to_tests[0], to_program[1]])
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
    own = None if ended_for_us else failure(served, limits)
    if not any("done" in message for message in said):
        if not proof.has_finished:
            raise BadGroundTruth("code: the row's tests exceed their limits with any program, also with an empty one")
        own = own or _exhaustion(tested, said, limits)
    elif passed == total:
        return Graded(passed, total)
    wrong = next((f"{m['why']} (test {m['test']})" for m in verdicts if not m["ok"]), "")
    return Graded(min(passed, total - 1), total, own or Reason.WRONG, describe(served) if own else wrong)


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


def _job(tests: Assertions, *, stubs: Sequence[str] | None = None) -> bytes:
    job = {"tests": tests.pieces, "setup": tests.setup, "entry_points": tests.entry_points}
    return json.dumps(job if stubs is None else {**job, "stubs": stubs}).encode()


def _said(tested: Run) -> list[Message]:
    return [json.loads(line) for line in tested.answer.split(b"\n")[:-1]]


def _broken(said: Sequence[Message]) -> str | None:
    return next((message["broken"] for message in said if "broken" in message), None)
