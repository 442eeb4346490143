"""Generate a pack's groups: check its tasks, wait for or pin their version, let their environments roll out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog

from penstock.protocol.episode import Episode
from penstock.protocol.errors import PenstockError
from penstock.protocol.facts import TaskList, decode
from penstock.protocol.groups import AbandonedCompletion, Task
from penstock.protocol.heartbeats import Activity
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits, check_task
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.environments.environment import (
    Environment,
    KeptTrajectories,
    Sampler,
    as_baseline,
    build_group,
    rows_of,
)
from penstock.rollout_service.errors import EngineError, ReplyRefused, TaskRefused, WeightsUnverified
from penstock.rollout_service.packs.finished_episodes import ContinuedEpisode, FinishedEpisodes
from penstock.rollout_service.packs.pack_loops import ReceivedPack
from penstock.rollout_service.packs.settlement import Settlement
from penstock.rollout_service.retry import retry
from penstock.rollout_service.run_images import RunImages
from penstock.rollout_service.teachers.teacher import Teacher
from penstock.rollout_service.weights.servable_versions import ServableVersions, VersionGate
from penstock.rollout_service.weights.weight_follower import WeightFollower

log = structlog.get_logger("rollout.packs")


@dataclass(eq=False, kw_only=True)
class PackGenerator:
    engine: Engine
    environments: Mapping[str, Environment]
    weights: WeightFollower
    servable: ServableVersions
    gate: VersionGate
    blobs: Blobs
    settlement: Settlement
    activity: Activity
    episodes: FinishedEpisodes
    teacher: Teacher | None = None
    images: RunImages | None = None

    def __post_init__(self) -> None:
        self.limits = ModelLimits(None, None)

    def use_model(self, folder: Path) -> None:
        self.limits = ModelLimits.of(folder)
        if self.images is not None:
            self.images.use_model(folder)
        for environment in self.environments.values():
            environment.use_model(folder, self.limits.context_tokens)

    async def check_teacher(self, folder: Path, *, start_deadline_s: float) -> None:
        if self.teacher is not None:
            with self.activity.working("waiting for the teacher"):
                await self.teacher.check(folder, start_deadline_s=start_deadline_s)

    async def close(self) -> None:
        for environment in self.environments.values():
            await environment.close()
        if self.teacher is not None:
            await self.teacher.close()

    async def generate(self, received: ReceivedPack) -> list[Group]:
        """Return the groups of a pack, without those whose tasks were refused.

        Raises EngineError, PackError or TaskRefused, which `Settlement` handles.
        """
        tasks = await self._accepted_tasks(received)
        try:
            if received.delivery.num_delivered > 1:
                await self.episodes.load(tasks, vocab_size=self.limits.vocab_size, max_staleness=self._kept_staleness())
            return await self._generate(received, tasks)
        except BaseException:
            await self.episodes.forget([task.group_id for task in tasks], delete=False)
            raise

    async def announced(self, groups: Sequence[Group]) -> None:
        await self.episodes.forget([group.group_id for group in groups], delete=True)

    def _kept_staleness(self) -> dict[str, int]:
        limits = {name: environment.kept_staleness for name, environment in self.environments.items()}
        return {name: versions for name, versions in limits.items() if versions is not None}

    async def _generate(self, received: ReceivedPack, tasks: Sequence[Task]) -> list[Group]:
        by_pin: dict[int | None, list[Task]] = {}
        for task in tasks:
            by_pin.setdefault(task.pinned_version, []).append(task)
        groups: list[Group] = []
        for pin, same in by_pin.items():
            async with self._version_held(pin, issued_for=max(task.issued_version for task in same)):
                sampler, begun_at = self.servable.sampler(None if pin is None else PolicyVersion(pin)), time.monotonic()
                with self.activity.working("generating"):
                    made, refused = await self._roll_out(same, sampler)
            with self.activity.working("waiting for the copy of a version"):
                await self._check_origin(made, pin, begun_at)
            groups += await self._scored_by_teacher(same, made)
            for task, reason in refused:
                await self.settlement.refuse(received, [task], reason)
            if refused:
                await self.episodes.forget([task.group_id for task, _ in refused], delete=True)
        return groups

    async def _scored_by_teacher(self, tasks: Sequence[Task], groups: Sequence[Group]) -> Sequence[Group]:
        wanted = {task.group_id: task.teacher_top_k for task in tasks}
        top_ks = [wanted[group.group_id] for group in groups]
        if self.teacher is None or all(top_k is None for top_k in top_ks):
            return groups
        with self.activity.working("asking the teacher"):
            return await self.teacher.score(groups, top_ks, vocab_size=self.limits.vocab_size)

    async def _accepted_tasks(self, received: ReceivedPack) -> Sequence[Task]:
        fact = received.delivery.fact
        tasks = fact.tasks
        if fact.tasks_blob is not None:
            ref = fact.tasks_blob
            data = await retry(lambda: asyncio.to_thread(self.blobs.get, ref), f"read the tasks of pack {fact.pack_id}")
            tasks = decode(data, TaskList).tasks
        accepted: list[Task] = []
        refused: dict[str, tuple[TaskRefused, list[Task]]] = {}
        for task in tasks:
            try:
                check_task(task, limits=self.limits, split=received.split, environments=self.environments)
                if task.teacher_top_k is not None and self.teacher is None:
                    raise TaskRefused(
                        "no_teacher",
                        f"{task.group_id} needs a teacher's log-probabilities, and this worker's run file has no teacher.url",
                    )
            except TaskRefused as err:
                refused.setdefault(err.reason, (err, []))[1].append(task)
            else:
                accepted.append(task)
        for reason, refused_tasks in refused.values():
            await self.settlement.refuse(received, refused_tasks, reason)
        return accepted

    @contextlib.asynccontextmanager
    async def _version_held(self, pin: int | None, *, issued_for: int) -> AsyncIterator[None]:
        if pin is None:
            with self.gate.ordinary_waiting():
                await self.weights.wait_for_version(PolicyVersion(issued_for))
                await self.gate.wait_for_ordinary()
            yield
        else:
            async with self.weights.pinned(PolicyVersion(pin)):
                yield

    async def _roll_out(
        self, tasks: Sequence[Task], sampler: Sampler
    ) -> tuple[list[Group], list[tuple[Task, TaskRefused]]]:
        """Return the groups, and the tasks that their environment has no group for; its environments run side by side.

        Raises EngineError, or PackError, as soon as one of them does: the pack is requeued as a whole, so the others are cancelled.
        """
        by_environment: dict[str, list[Task]] = {}
        for task in tasks:
            by_environment.setdefault(task.environment, []).append(task)
        try:
            async with asyncio.TaskGroup() as rolling:
                rolled = [
                    rolling.create_task(self._roll_out_in(self.environments[name], same, sampler))
                    for name, same in by_environment.items()
                ]
        except* PenstockError as failures:
            engine, _ = failures.split(EngineError)
            if engine is not None:
                await self.engine.check_health()
            raise (engine or failures).exceptions[0] from None
        done = [one.result() for one in rolled]
        return [group for groups, _ in done for group in groups], [one for _, refused in done for one in refused]

    async def _roll_out_in(
        self, environment: Environment, tasks: Sequence[Task], sampler: Sampler
    ) -> tuple[list[Group], list[tuple[Task, TaskRefused]]]:
        """Roll out the tasks of one environment; if it raises, only its tasks are refused."""
        groups: list[Group] = []
        refused: list[tuple[Task, TaskRefused]] = []
        try:
            rolled = await self._with_baselines(environment, tasks, sampler)
        except TaskRefused as err:
            return [], [(task, err) for task in tasks]
        except PenstockError:
            raise
        except Exception as err:
            log.exception("environment failed", environment=environment.name, num_groups=len(tasks))
            said = TaskRefused("environment_failed", f"{environment.name} raised {type(err).__name__}: {err}")
            return [], [(task, said) for task in tasks]
        for task, members in zip(tasks, rolled, strict=True):
            if isinstance(members, TaskRefused):
                refused.append((task, members))
                continue
            if lacks := _refusal_without_experts(task, [row for member in members.kept for row in rows_of(member)]):
                refused.append((task, lacks))
                continue
            groups.append(build_group(task, members.kept, members.abandoned))
        return groups, refused

    async def _with_baselines(
        self, environment: Environment, tasks: Sequence[Task], sampler: Sampler
    ) -> list[_Members | TaskRefused]:
        """Roll out the tasks; those that want a baseline get one more, greedy completion, the last of their group.

        An environment receives it as a separate task, so it need not know about baselines.
        """
        measured = [number for number, task in enumerate(tasks) if task.with_baseline]
        rolled = await environment.rollout([*tasks, *(_greedy(tasks[number]) for number in measured)], sampler)
        groups = [_members(outcome) for outcome in rolled[: len(tasks)]]
        for number, greedy in zip(measured, map(_members, rolled[len(tasks) :]), strict=True):
            group = groups[number]
            if isinstance(greedy, TaskRefused):
                groups[number] = greedy
            elif not isinstance(group, TaskRefused):
                group.kept.append(as_baseline(greedy.kept[0], tasks[number].group_size))
        return groups

    async def _check_origin(self, groups: Sequence[Group], pin: int | None, begun_at: float) -> None:
        """Raise EngineError if any token was sampled by weights that were not verified; wait for their copies, so nothing may be pinned."""
        for group in groups:
            # Those of an earlier delivery were checked by the worker that played them.
            played = [one for one in group.episodes or group.trajectories if not isinstance(one, ContinuedEpisode)]
            rows = [row for member in played for row in rows_of(member)]
            versions = {run.version for row in rows for run in row.version_runs}
            await self.weights.wait_until_verified(versions)
            if self.engine.withdrawn_at >= begun_at:
                raise WeightsUnverified(f"{group.group_id}: a version that may have sampled it was withdrawn")
            if problem := self._origin_problem(
                versions, pin, max((int(row.token_ids.max()) for row in rows), default=0)
            ):
                await self.engine.check_health()
                raise ReplyRefused(f"{group.group_id}: {problem}")

    def _origin_problem(self, versions: Set[int], pin: int | None, highest: int) -> str:
        if self.limits.vocab_size is not None and highest >= self.limits.vocab_size:
            return f"token id {highest}, but the model has {self.limits.vocab_size} tokens"
        if unknown := versions - self.engine.applied:
            return (
                f"tokens of version {min(unknown)}, which this worker never loaded; another process changes this engine's weights: "
                "give each engine to one worker"
            )
        return "" if pin is None or versions <= {pin} else f"pinned to version {pin}, but sampled by {sorted(versions)}"


class _Members(NamedTuple):
    kept: list[Trajectory | Episode]
    abandoned: tuple[AbandonedCompletion, ...]


def _members(rolled: Sequence[Trajectory | Episode] | TaskRefused) -> _Members | TaskRefused:
    if isinstance(rolled, TaskRefused):
        return rolled
    return _Members([*rolled], rolled.abandoned if isinstance(rolled, KeptTrajectories) else ())


def _refusal_without_experts(task: Task, rows: Sequence[Trajectory]) -> TaskRefused | None:
    if task.sampling.routers is None or all(row.experts is not None for row in rows):
        return None
    return TaskRefused(
        "experts_not_returned",
        f"{task.group_id}: this worker's engine, or the environment {task.environment}, does not say which experts computed a token; "
        "set trainer.router_replay = false, or use the embedded engine or SGLang",
    )


def _greedy(task: Task) -> Task:
    alone = {"group_size": 1, "with_baseline": False, "redundant_completions": 0, "redundant_wait": 0.0}
    return task.model_copy(update={"sampling": task.sampling.model_copy(update={"temperature": 0.0}), **alone})
