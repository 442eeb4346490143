"""A pack whose tasks belong to several environments: they run side by side, and one that fails takes no other with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agents.environments.played import Script, engine_of, playing, task_of
from tests.groups import make_task

from penstock.agents.environments.play import done
from penstock.protocol.groups import Sampling, Task
from penstock.protocol.heartbeats import Activity
from penstock.protocol.token_annotations import Routers
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.environments.environment import Environment, Sampler, build_trajectory
from penstock.rollout_service.errors import EngineError, TaskRefused
from penstock.rollout_service.packs.generate_pack import PackGenerator


class Does(Environment):
    """Answers each task with one token, after it has done something."""

    def __init__(self, name: str, first: Callable[[], Awaitable[object]]) -> None:
        self.name, self._first, self.cancelled = name, first, 0  # pyright: ignore[reportAttributeAccessIssue]

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Trajectory]]:
        try:
            await self._first()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = Completion([7], [-0.5], (VersionRun(PolicyVersion(0), 0, 1),), "stop", "x")
        return [[build_trajectory(task.prompt_ids, said)] * task.group_size for task in tasks]


class Pack:
    def __init__(self, *environments: Environment, tasks: Sequence[str], routers: Routers | None = None) -> None:
        self.health_checks = 0
        self.refused: dict[str, str] = {}
        sampling = Sampling(max_new_tokens=16, stop_token_ids=(2,), routers=None if routers is None else routers.shape)
        self._tasks = tuple(
            make_task(f"e0.p{number}.a0", group_size=2).model_copy(update={"environment": name, "sampling": sampling})
            for number, name in enumerate(tasks)
        )
        nothing: Any = SimpleNamespace(
            applied={0}, withdrawn_at=0.0, wait_until_verified=self._at_once, wait_for_version=self._at_once, wait_for_ordinary=self._at_once,
            ordinary_waiting=contextlib.nullcontext, sampler=lambda _: None, check_health=self._check_health, refuse=self._refuse,
            forget=self._at_once,
        )  # fmt: skip
        self._generator = PackGenerator(
            engine=nothing, environments={environment.name: environment for environment in environments}, weights=nothing, servable=nothing,
            gate=nothing, blobs=nothing, settlement=nothing, activity=Activity(), episodes=nothing,
        )  # fmt: skip
        self._generator.limits = ModelLimits(None, None, routers)

    async def generate(self) -> list[Group]:
        fact = SimpleNamespace(tasks=self._tasks, tasks_blob=None, pack_id="p0")
        received: Any = SimpleNamespace(delivery=SimpleNamespace(fact=fact, num_delivered=1), split="train")
        return await self._generator.generate(received)

    async def _at_once(self, *_: object, **__: object) -> None:
        pass

    async def _check_health(self) -> None:
        self.health_checks += 1

    async def _refuse(self, received: object, tasks: Sequence[Task], reason: TaskRefused) -> None:
        for task in tasks:
            assert self.refused.setdefault(task.group_id, f"{reason.reason}: {reason}").startswith(reason.reason)


async def nothing() -> None:
    """Do nothing."""


async def test_an_environment_that_hangs_delays_no_other_of_its_pack() -> None:
    """The others have finished while it hangs; the groups come as before, each once, those of one environment together."""
    released, finished = asyncio.Event(), asyncio.Event()

    async def finish() -> None:
        finished.set()

    pack = Pack(
        Does("stuck", released.wait), Does("quick", finish), tasks=["stuck", "quick", "stuck", "quick"]
    )  # fmt: skip
    generating = asyncio.create_task(pack.generate())
    async with asyncio.timeout(30):
        await finished.wait()
        assert not generating.done()
        released.set()
        groups = await generating
    assert [group.group_id for group in groups] == [f"e0.p{number}.a0" for number in (0, 2, 1, 3)]
    assert pack.refused == {}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TaskRefused("too_long", "no room"), "too_long: no room"),
        (KeyError("board"), "environment_failed: broken raised KeyError: 'board'"),
    ],
)
async def test_an_environment_that_raises_loses_its_own_groups_only(error: Exception, said: str) -> None:
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise error

    sound = Does("sound", failed.wait)
    pack = Pack(Does("broken", fail), sound, tasks=["broken", "sound", "broken"])
    groups = await pack.generate()
    assert [group.group_id for group in groups] == ["e0.p1.a0"]
    assert pack.refused == {"e0.p0.a0": said, "e0.p2.a0": said}
    assert (sound.cancelled, pack.health_checks) == (0, 0)


async def test_a_group_that_does_not_say_which_experts_computed_its_tokens_is_refused() -> None:
    """The trainer wants to know them, and would refuse the group: its task is dead-lettered with the fix."""
    pack = Pack(Does("silent", nothing), tasks=["silent"], routers=Routers((0, 1), 8, 2))
    assert await pack.generate() == []
    said = pack.refused["e0.p0.a0"]
    assert said.startswith(
        "experts_not_returned: e0.p0.a0: this worker's engine, or the environment silent, does not say"
    )


async def test_a_failure_of_the_engine_ends_every_environment_of_the_pack() -> None:
    """The pack is requeued as a whole, so the others are cancelled instead of waited for, and nothing is refused."""

    async def fail() -> None:
        raise EngineError("gone")

    stuck = Does("stuck", asyncio.Event().wait)
    pack = Pack(stuck, Does("broken", fail), tasks=["stuck", "broken"])
    with pytest.raises(EngineError, match="gone"):
        await pack.generate()
    assert (stuck.cancelled, pack.health_checks, pack.refused) == (1, 1, {})


async def test_a_cancelled_episode_closes_its_play_and_asks_no_more_of_the_engine(model: Path) -> None:
    sampling, cancelled = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        sampling.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    script = Script(lambda: done(1.0))
    rolling = asyncio.create_task(playing(model, script).rollout([task_of()], engine_of(model, before=hang)))
    async with asyncio.timeout(30):
        await sampling.wait()
        rolling.cancel()
        await asyncio.wait([rolling])
        await cancelled.wait()
    assert rolling.cancelled()
    assert script.closed == [0]
