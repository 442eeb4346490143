"""Grader processes: the cause when one does not finish, their environment, and the CPU time of a group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.reward_service.errors import GraderFailed
from penstock.reward_service.graders import grader_pool
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards import math_answer
from penstock.reward_service.rewards.math_answer import Graded

BOMB = "10^{10^{10}}"


class Measured(GraderPool):
    """A pool that notes the limit of every answer, and has another pool grade it."""

    def __init__(self, pool: GraderPool) -> None:
        super().__init__(0, cpu_s=0.5)
        self._pool = pool
        self.limits_s: list[float] = []

    async def equal_within(self, gold: str, answer: str, cpu_s: float) -> tuple[Graded, float]:
        self.limits_s.append(cpu_s)
        return await self._pool.equal_within(gold, answer, cpu_s)


@pytest.fixture
async def pool() -> AsyncIterator[GraderPool]:
    """Two graders with half a second of CPU time for an answer."""
    pool = GraderPool(2, cpu_s=0.5)
    yield pool
    await pool.close()


async def test_an_answer_that_exhausts_the_grader_is_wrong_and_says_so(pool: GraderPool) -> None:
    """An answer that runs out of CPU time twice, after the truth parsed, is wrong with part timeout; others go on."""
    rounded = (f"{BOMB}+2 \\approx 2.5", f"{'(' * 45}\\sqrt5{')' * 45} \\approx 2.236")
    completions = (*(f"\\boxed{{{answer}}}" for answer in (BOMB, "x+1", "x", *rounded)),)
    verdicts = await math_answer.judge(completions, "1+x", pool.equal)
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert [verdict.parts["timeout"] for verdict in verdicts] == [1.0, 0.0, 0.0, 0.0, 0.0]


async def test_hostile_answers_of_a_group_share_a_budget(pool: GraderPool) -> None:
    """The first of a group's hostile answers may use the limit, the others a tenth; others still get their verdict."""
    await pool.equal("x+1", "1+x")
    pids, measured = pool.pids, Measured(pool)
    completions = (*(f"\\boxed{{{BOMB}+{n}}}" for n in range(4)), "\\boxed{x+2}")
    verdicts = await math_answer.judge(completions, "2+x", measured.for_group())
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert measured.limits_s == [0.5, 0.5, 0.05, 0.05, 0.05, 0.05], "the first reads the truth"
    assert pool.pids == pids, "a hostile answer ends a child, not the process that has imported everything"


async def test_an_answer_that_exhausts_memory_or_crashes_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a grader by the answer's doing is the answer's failure, however it ends."""
    package = "penstock.reward_service.graders"
    source = (
        f"import os, signal, sys\nfrom {package} import grader_process\n"
        "def equal(gold, answer):\n    match answer:\n        case 'memory': raise MemoryError\n"
        "        case 'depth': raise RecursionError\n        case 'crash': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        case 'killed': os.kill(os.getpid(), 9)\n    return answer == gold\n"
        "grader_process.serve(lambda text: text, equal)"
    )
    file = tmp_path / "grader.py"
    file.write_text(source)
    monkeypatch.setattr(grader_pool, "command", lambda kind: [sys.executable, str(file)])
    pool = GraderPool(1, cpu_s=1.0)
    try:
        for answer in ("memory", "depth", "crash"):
            assert await pool.equal("x", answer) is Graded.EXHAUSTED
            assert await pool.equal("x", "x") is Graded.RIGHT
        with pytest.raises(GraderFailed, match="SIGKILL"):
            await pool.equal("x", "killed")
    finally:
        await pool.close()


async def test_a_grader_killed_from_outside_is_an_error(pool: GraderPool) -> None:
    """A grader that exits for another reason is replaced; if that happens twice it is an error, never a 0."""
    assert await pool.equal("x+1", "1+x") is Graded.RIGHT
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert await pool.equal("x+2", "2+x") is Graded.RIGHT, "the next question gets a fresh grader"

    async def kill_them_all() -> None:
        while True:
            for grader in pool.pids:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its successor is not known yet
                    os.killpg(grader, signal.SIGKILL)  # with its child, which could still answer
            await asyncio.sleep(0)  # a grader may answer within milliseconds

    killer = asyncio.create_task(kill_them_all())
    with pytest.raises(GraderFailed, match="SIGKILL"):
        await pool.equal("x+3", "3+x")
    killer.cancel()
    assert await pool.equal("x+4", "4+x") is Graded.RIGHT


async def test_a_cancelled_question_leaves_no_grader_behind(pool: GraderPool) -> None:
    """Cancelling a request kills its grader, so that a late answer is not taken for another request's."""
    await pool.equal("x+1", "1+x")
    asking = asyncio.create_task(pool.equal("5", BOMB))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await pool.equal("x+5", "5+x") is Graded.RIGHT
    assert await pool.equal("x+5", "6+x") is Graded.WRONG


async def test_a_truth_that_does_not_parse_is_reported(pool: GraderPool) -> None:
    """A truth that math-verify cannot read is the data's error."""
    assert await pool.equal("\\,", "5") is Graded.GOLD_UNREADABLE


async def test_graders_end_with_their_pool() -> None:
    pool = GraderPool(1, cpu_s=5.0)
    await pool.equal("x+1", "1+x")
    (pid,) = pool.pids
    await pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_grader_gets_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATS__PASSWORD", "hunter2")
    pool = GraderPool(2, cpu_s=1.0)
    environments = [grader._environ for grader in pool._all]
    assert len(environments) == 2
    assert not [name for environment in environments for name in environment if name.startswith("PENSTOCK_")]
    assert all("PATH" in environment for environment in environments)


async def test_the_answers_of_a_group_share_its_time_and_groups_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two limits for the group; when they are spent every further answer has a tenth of one, another group its own."""
    pool = GraderPool(1, cpu_s=10.0)
    limits: list[float] = []

    async def exhausts(_gold: str, _answer: str, cpu_s: float) -> tuple[Graded, float]:
        limits.append(cpu_s)
        return Graded.EXHAUSTED, 1.5 * cpu_s

    monkeypatch.setattr(pool, "_ask", exhausts)
    for _ in range(2):
        equal = pool.for_group()
        for number in range(4):
            assert await equal("1", str(number)) is Graded.EXHAUSTED
    assert limits[:4] == [10.0, 5.0, 1.0, 1.0]
    assert limits[4:] == [10.0, 5.0, 1.0], "the first answer exhausted the whole limit before: its verdict is known"
