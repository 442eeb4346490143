"""The code reward: finding the program and the tests, comparing outputs, and attributing failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.deadline import ends_within
from tests.reward_service.processes import Service
from tests.reward_service.program_tests.conftest import descendants
from tests.servers import wait_for

from penstock.reward_service.errors import SandboxFailed
from penstock.reward_service.program_tests import code_blocks, grade, tests_of_row
from penstock.reward_service.program_tests import grade as sandbox_pool
from penstock.reward_service.program_tests.grade import Graded, SandboxPool
from penstock.reward_service.program_tests.tests_of_row import StdinTests
from penstock.reward_service.rewards import code
from penstock.sandbox import canary
from penstock.sandbox.zygote_command import Kind, Launch
from penstock.sandbox.zygote_process import Limits, Reason, Run

LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * 1024**2)
DOUBLE = StdinTests(("1", "2", "3"), ("2", "4", "6"))
GOOD = "print(2 * int(input()))"


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    """Two slots in the sandbox that works here; a machine without one fails the tests instead of skipping them."""
    found = canary.probe("auto")
    assert found.kind is not None, found
    pool = SandboxPool(Launch(found.kind), 2, LIMITS)
    yield pool
    await pool.close()


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("4\n", "4", True), ("  4  \r\n\n", "4\n", True), ("1 2\n3", "1  2 \n 3", True), ("1 2 3", "1 2\n3", False),
        ("0.3333333333", "0.33333333", True), ("0.3334", "0.3333", False), ("4.0", "4", True), ("1e3", "1000", True),
        (f"{10**16 + 1}", f"{10**16}", False), ("007", "7", True), ("yes", "YES", False), ("nan", "nan", True),
        ("nan", "1", False), ("inf", "1e400", False), ("", "", True), ("", "0", False), ("1\n2", "1", False),
        ("9" * 5000, "9" * 5001, False), ("1e999", "9" * 309, False), ("1e999", "1" + "0" * 399, False),
        ("1e999", "1e999", True), ("1e400", "1E+400", True), ("2e999", "1e999", False), ("inf", "9" * 309, False),
        ("-1e999", "-" + "9" * 309, False), ("1.2345678901234567e19", "12345678901234567890", False),
        ("123456789000.0", "123456789012", False), ("1e16", f"{10**16 + 1}", False), ("1e16", f"{10**16}", True),
        (f"{10**16}.0", f"{10**16 + 1}", False), ("1.9999999999", "2", True), ("1.9999", "2", False),
        ("1000000000.5", "1000000000.4999999", True), ("1e-9999", "0.0", True), ("٣", "3", False),
        ("1_000", "1000", False), ("0x10", "16", False), ("1+0j", "1", False), ("1/2", "0.5", False),
        ("50%", "50", False), ("nan", "0", False), ("-0", "0", True),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_words_and_numbers(printed: str, expected: str, same: bool) -> None:
    """White space does not count; numbers of ASCII digits compare by value, integers exactly; lines in order."""
    assert tests_of_row.same_output(printed, expected) is same


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        (3, 3, True), (3.0, 3, True), (True, 1, False), ([1, 2], [1, 2], True), (7, [7], True), ([7], [[7]], True),
        ([1], [1, 2], False), ({"a": [0.1]}, {"a": [0.1000000001]}, True), ("1", 1, False), (None, None, True),
        (10**400, 1.5, False), (INF, 10**400, False), (1e19, 10**19, True), (1e19, 10**19 + 1, False),
        (123456789000.0, 123456789012, False), (3.0000000001, 3, True), (10**400, 1e308, False),
        (10**400, 10**400, True), (NAN, NAN, True), (NAN, 3, False), (NAN, 3.0, False), (INF, INF, True),
        (INF, -INF, False), ("3", 3, False),
    ],
)  # fmt: skip
def test_results_are_compared_by_value(result: Any, expected: Any, same: bool) -> None:
    """JSON results compare by type and value, numbers within the tolerance, booleans only with booleans."""
    assert tests_of_row.same_result(result, expected) is same


def test_a_program_is_found_among_any_number_of_names() -> None:
    """The names of 20,000 tests and 40 KiB of blocks that define none of them took minutes in the service itself."""
    blocks = "```python\nf == 3  # def\n```\n" * 2000
    with ends_within(20.0):
        assert (
            code_blocks.program(f"```python\ndef f(): ...\n```\n{blocks}", [*map("f{}".format, range(20_000)), "f"])
            == "def f(): ...\n"
        )


async def test_share_and_all(pool: SandboxPool) -> None:
    """The reward is the share of passed tests, or 1 only for all of them; the parts say how many, and why it failed."""
    half = "n = int(input())\nprint(2 * n if n < 3 else 0)"
    truth = {"inputs": list(DOUBLE.inputs), "outputs": list(DOUBLE.outputs)}
    completions = (f"```python\n{GOOD}\n```", half, "I do not know", "```rust\nfn main() {}\n```", GOOD)
    share = await code.judge(completions, truth, {}, pool.grade, all_or_nothing=False)
    assert [round(verdict.reward, 3) for verdict in share] == [1.0, 0.667, 0.0, 0.0, 1.0]
    assert dict(share[1].parts) == {"passed": 2.0, "tests": 3.0, "has_code": 1.0, "failed_wrong": 1.0}
    assert share[2].parts["failed_raised"] == 1.0
    assert dict(share[3].parts) == {"has_code": 0.0, "failed_no_program": 1.0}
    every = await code.judge(completions, truth, {}, pool.grade, all_or_nothing=True)
    assert [verdict.reward for verdict in every] == [1.0, 0.0, 0.0, 0.0, 1.0]
    bodies = (
        "    return x * 2",
        "```python\ndef f(x): return x * 2\n```\nUse:\n```python\nprint(f(1))\n```",
        "    return x",
    )
    prompt, tests = "def f(x):\n", ["assert f(2) == 4"]  # HumanEval's prompt is the head of the program
    found = await code.judge(bodies, tests, {}, pool.grade, all_or_nothing=True, prompt=prompt)
    assert [verdict.reward for verdict in found] == [1.0, 1.0, 0.0]


async def test_a_program_killed_from_outside_is_an_error(pool: SandboxPool) -> None:
    """A SIGKILL from outside (as when the machine is out of memory) is never a 0, and the next program is graded."""
    task = asyncio.create_task(pool.grade("import time; time.sleep(60)", DOUBLE))
    killed = 0
    while killed < 2:  # the pool tries twice
        for zygote in pool.pids:
            for child in descendants(zygote):
                if _is_sleeping_program(child):
                    os.kill(child, signal.SIGKILL)
                    killed += 1
        await asyncio.sleep(0.01)
        if task.done():
            break
    with pytest.raises(SandboxFailed, match=r"killed by another process"):
        await task
    assert (await pool.grade(GOOD, DOUBLE)).passed == 3


async def test_a_killed_zygote_is_replaced(pool: SandboxPool) -> None:
    assert (await pool.grade(GOOD, DOUBLE)).passed == 3
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert (await pool.grade(GOOD, DOUBLE)).passed == 3


async def test_a_cancelled_grading_leaves_no_program_behind(pool: SandboxPool) -> None:
    task = asyncio.create_task(pool.grade("import time; time.sleep(60)", DOUBLE))

    def programs() -> list[int]:
        return [child for pid in pool.pids for child in descendants(pid) if _is_sleeping_program(child)]

    await asyncio.to_thread(wait_for, programs, "the program to sleep", 30.0)
    before = [child for pid in pool.pids for child in descendants(pid)]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "the programs to end")
    graded = await asyncio.gather(*(pool.grade(GOOD, DOUBLE) for _ in range(4)))
    assert [one.passed for one in graded] == [3] * 4


@pytest.mark.parametrize("kind", list(Kind))
def test_zygotes_and_programs_exit_with_a_killed_service(kind: Kind) -> None:
    if problem := canary.attack(kind):
        pytest.skip(f"{kind} does not hold on this machine: {problem}")
    script = (
        "import asyncio\nfrom penstock.reward_service.program_tests.grade import *\n"
        "from penstock.reward_service.program_tests.tests_of_row import *\n"
        "from penstock.sandbox.zygote_command import Kind\n"
        f"pool = SandboxPool(Launch(Kind({str(kind)!r})), 1, Limits(cpu_s=60.0))\n"
        "asyncio.run(pool.grade('import time; time.sleep(300)', StdinTests(('',), ('',))))"
    )
    service = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: any(map(_is_sleeping_program, descendants(service.pid))), "the program to run")
        held = descendants(service.pid)
    finally:
        service.kill()
        service.wait()
    assert len(held) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in held), "zygote and program to end")


def test_a_machine_without_a_sandbox_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no sandbox starts, the probe gives the reason for each kind and never runs a program unconfined."""
    monkeypatch.setenv("PATH", "/nonexistent")
    found = canary.probe("bubblewrap")
    assert found.kind is None
    assert "not installed" in found.refused[Kind.BUBBLEWRAP]
    assert "refused" in str(found)
    assert canary.probe("off").kind is None


def test_the_service_reports_its_sandbox(shared_service: Service) -> None:
    """GET /v1/rewards names the sandbox, and a row scored by hand is run in it."""
    listed = {row["name"]: row for row in shared_service.get("/v1/rewards")["rewards"]}
    assert "programs run in" in listed["code"]["description"]
    answer = httpx.post(
        f"{shared_service.url}/v1/score",
        timeout=300,
        json={"reward": "code_generation",
         "groups": [{"completions": [GOOD, "print(0)"], "ground_truth": {"inputs": ["4"], "outputs": ["8"]}}]},
    ).json()  # fmt: skip
    assert [score["score"] for score in answer["results"][0]["scores"]] == [1.0, 0.0], answer


def test_a_service_without_a_sandbox_offers_no_code(start_service: Any) -> None:
    """With the sandbox switched off the reward is not offered, and requesting it gives the reason."""
    service = start_service("reward_service.code_sandbox=off")
    group = {"completions": [GOOD], "ground_truth": {"inputs": ["4"], "outputs": ["8"]}}
    answer = httpx.post(f"{service.url}/v1/score", json={"reward": "code", "groups": [group]}, timeout=60.0).json()
    assert answer["results"][0]["error"]["reason"] == "SandboxUnavailable"
    assert "refused" in answer["results"][0]["error"]["detail"]


def _is_sleeping_program(pid: int) -> bool:
    """Return True if a process is confined: a program, not a zygote."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "Seccomp:\t2" in status and "State:\tS" in status


@pytest.mark.parametrize(
    ("cpu_s", "wall_s", "budget_s", "passed", "reason"),
    [(0.4, 0.0, 1.0, 3, Reason.CPU_TIME), (0.0, 2.4, 1.0, 3, Reason.WALL_TIME), (0.4, 2.4, 1.21, 4, Reason.CPU_TIME),
     (0.9, 5.0, 1e9, 9, None)],
)  # fmt: skip
def test_a_program_that_uses_up_its_part_of_the_groups_time_fails_the_tests_that_are_left(
    monkeypatch: pytest.MonkeyPatch, cpu_s: float, wall_s: float, budget_s: float, passed: int, reason: Reason | None
) -> None:
    """Each test is within its own limit; all together are not, by CPU time or by waiting, unless there is no budget."""
    now = [0.0]

    def one(*_: object) -> Run:
        now[0] += wall_s
        return Run(status=0, cpu_s=cpu_s, output=bytearray(b"2"))

    monkeypatch.setattr(grade, "_one", one)
    monkeypatch.setattr(grade.time, "monotonic", lambda: now[0])
    slot = cast("grade.Slot", SimpleNamespace(stopped=threading.Event()))
    tests = StdinTests(("1",) * 9, ("2",) * 9)
    found = grade.grade(slot, "", tests, LIMITS, stop_early=False, budget_s=budget_s)
    assert (found.passed, found.total, found.reason) == (passed, 9, reason)


async def test_the_programs_of_a_group_have_equal_parts_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal programs count once; each part is at least the limit of one test: no other program takes it away."""
    budgets: list[float] = []

    def note(*_: object, budget_s: float, **__: object) -> Graded:
        budgets.append(budget_s)
        return Graded(1, 1)

    monkeypatch.setattr(sandbox_pool, "grade", note)
    pool = SandboxPool(Launch(Kind.LANDLOCK), 1, LIMITS, group_cpu_s=3.0)
    for completions in ("a", "ab", "abab", "abcdefgh"):
        await code.judge(
            tuple(completions), {"inputs": ["1"], "outputs": ["1"]}, None, pool.grade, all_or_nothing=False
        )
    await pool.close()
    assert budgets == [3.0, 1.5, 1.5, 1.5, 1.5, *[1.0] * 8]
