"""What a grader process gets: no settings of the service, and a part of its group's CPU time."""

from __future__ import annotations

import pytest

from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards.math_answer import Graded


def test_a_grader_gets_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATS__PASSWORD", "hunter2")
    pool = GraderPool(2, cpu_s=1.0)
    environments = [grader._environ for grader in pool._all]
    assert len(environments) == 2
    assert not [name for environment in environments for name in environment if name.startswith("PENSTOCK_")]
    assert all("PATH" in environment for environment in environments)


async def test_the_answers_of_a_group_share_its_time_and_groups_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two limits for the group; when they are spent every further answer has a tenth of one, and another group its own."""
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
